"""Against PEFT itself: which modules it adapts, at which rank, with which scale."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.adapter_files import CONFIG_FILE
from adapters.layout import AdapterLayout
from adapters.reader import read_layout
from tests.adapters.files import PARENTS, SHAPE


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SHAPE.vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=SHAPE.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=request.param,
        )
    )


PEFT_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 32},
    "rank 1": {"target_modules": ["down_proj"], "r": 1, "lora_alpha": 3},
    "alpha not whole": {"target_modules": ["down_proj"], "r": 7, "lora_alpha": 2.5},
    "all-linear": {"target_modules": "all-linear", "r": 4},
    "rslora": {"target_modules": ["q_proj"], "r": 16, "lora_alpha": 16, "use_rslora": True},
    "rank_pattern": {"target_modules": ["q_proj", "up_proj"], "r": 8, "rank_pattern": {"q_proj": 2}},
    "first pattern wins": {
        "target_modules": ["q_proj"],
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 3, "q_proj": 5},
        "alpha_pattern": {"q_proj": 7, "self_attn.q_proj": 9},
    },
    "patterns and rslora": {
        "target_modules": ["q_proj", "k_proj", "o_proj"],
        "use_rslora": True,
        "lora_alpha": 12,
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 2, r".*\.1\..*o_proj": 6},
        "alpha_pattern": {"[kq]_proj": 5, r"layers\.[0-9]+\.self_attn\.o_proj$": 1},
    },
    "pattern is no suffix": {"target_modules": ["q_proj"], "rank_pattern": {"proj": 2, "attn.q": 3}},
    "regex": {"target_modules": r".*\.(?:self_attn\.[qk]_proj|mlp\.down_proj)"},
    "regex as Unsloth writes it": {
        "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:k_proj|q_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attn|mlp|dense)\.(?:(?:k_proj|q_proj|gate_proj)))"
    },
    "regex of one layer": {"target_modules": r"model\.layers\.1\..*_proj"},
    "full names": {"target_modules": ["model.layers.0.mlp.up_proj", "layers.1.self_attn.o_proj"]},
    "one layer": {"target_modules": ["q_proj", "mlp.up_proj"], "layers_to_transform": 1},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "layers_pattern dotted": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["h", "model.layers"],
    },
    "full name beside layers": {
        "target_modules": ["model.layers.0.self_attn.q_proj", "k_proj"],
        "layers_to_transform": [1],
    },
    "exclude": {"target_modules": "all-linear", "exclude_modules": ["q_proj", "layers.1.mlp.up_proj"]},
    "exclude regex": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*layers\.0\..*"},
    "patterns beside layers": {
        "target_modules": ["q_proj", "k_proj"],
        "layers_to_transform": [1],
        "rank_pattern": {"layers.1.*k_proj": 2},
    },
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "rank_pattern": {"embed_tokens": 3}},
    "lm_head": {"target_modules": ["lm_head"], "alpha_pattern": {"lm_head": 5}, "use_rslora": True},
    "ends by full name": {"target_modules": ["model.embed_tokens", "lm_head", "v_proj"]},
    "ends by regex": {"target_modules": r".*embed_tokens|lm_head|.*\.1\..*up_proj"},
    "ends beside layers": {
        "target_modules": ["embed_tokens", "lm_head", "q_proj"],
        "layers_to_transform": [0],
    },
    "ends excluded": {"target_modules": r".*(embed_tokens|lm_head|q_proj)", "exclude_modules": ["lm_head"]},
    "ends tied": {"target_modules": ["lm_head", "q_proj"], "ensure_weight_tying": True, "r": 5},
    "ends tied by regex": {"target_modules": r".*(embed_tokens|q_proj)", "ensure_weight_tying": True},
    "not tied by a full regex": {
        "target_modules": r"model\.embed_tokens|.*q_proj",
        "ensure_weight_tying": True,
    },
    "saved, so not targeted": {
        "target_modules": r".*(embed_tokens|q_proj)",
        "modules_to_save": ["embed_tokens"],
    },
    "256": {"target_modules": ["q_proj"], "r": 256},
    "dropout and gaussian": {
        "target_modules": ["q_proj"],
        "lora_dropout": 0.3,
        "init_lora_weights": "gaussian",
    },
}


@pytest.mark.parametrize("fields", PEFT_CONFIGS.values(), ids=PEFT_CONFIGS.keys())
def test_modules_ranks_and_scales_are_those_of_peft(
    base: LlamaForCausalLM, tmp_path: Path, fields: dict[str, Any]
) -> None:
    own = copy.deepcopy(base)
    with warnings.catch_warnings():
        # PEFT advises against rsLoRA with patterns, and against LoRA on tied weights.
        warnings.simplefilter("ignore")
        model = get_peft_model(own, PeftLoraConfig(task_type="CAUSAL_LM", **copy.deepcopy(fields)))
        assert isinstance(model, PeftModel)
        model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    expected = {
        name.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    shape = replace(SHAPE, tied_embeddings=base.config.tie_word_embeddings, max_lora_rank=256)
    assert found(read_layout(tmp_path, shape)) == expected

    # PEFT writes out which modules it found; other programs leave the config as it was.
    config_file = tmp_path / CONFIG_FILE
    saved = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**saved, **fields}))
    assert found(read_layout(tmp_path, shape)) == expected


def found(layout: AdapterLayout) -> dict[str, tuple[int, float]]:
    """Rank and scale of every adapted module, by its full name."""
    places = {
        f"model.layers.{layer}.{PARENTS.get(module, 'mlp')}.{module}": update
        for (layer, module), update in layout.linear.items()
    }
    ends = {"model.embed_tokens": layout.embedding, "lm_head": layout.lm_head}
    places |= {path: update for path, update in ends.items() if update is not None}
    return {path: (update.rank, update.scale) for path, update in places.items()}
