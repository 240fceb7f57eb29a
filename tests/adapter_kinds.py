"""Adapters of every kind that PEFT writes, over random models, and PEFT itself to compare with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.oracles import Answer, Difference, PeftOracle

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Kind:
    """How an adapter is made: fields of PEFT's config, and how many tokens the vocabulary grows by."""

    rank: int
    targets: Sequence[str]
    added_tokens: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


PLAIN = {
    "plain r1": Kind(1, LINEAR),
    "plain r8": Kind(8, ("q_proj", "v_proj", "down_proj")),
    "plain r256": Kind(256, ("q_proj", "up_proj"), options={"use_rslora": True, "lora_alpha": 4}),
    "rslora with patterns": Kind(
        16,
        LINEAR,
        options={
            "use_rslora": True,
            "lora_alpha": 16,
            "rank_pattern": {"layers.1.mlp.gate_proj": 3, "v_proj": 20},
            "alpha_pattern": {"k_proj": 5, "down_proj": 3},
        },
    ),
}
VECTORS = {
    "dora r8": Kind(8, LINEAR, options={"use_dora": True}),
    "dora r16 over patterns": Kind(
        16,
        ("q_proj", "v_proj", "down_proj"),
        options={"use_dora": True, "rank_pattern": {"down_proj": 7}, "use_rslora": True, "lora_alpha": 8},
    ),
    "bias r4": Kind(4, LINEAR, options={"lora_bias": True}),
    "bias r15": Kind(15, ("k_proj", "v_proj", "up_proj"), options={"lora_bias": True, "lora_alpha": 40}),
}
ENDS = {
    "lora before": Kind(4, ("q_proj", "embed_tokens")),
    "lora after": Kind(20, ("v_proj", "lm_head"), options={"lora_bias": True}),
    "lora at both ends alone": Kind(8, ("embed_tokens", "lm_head")),
    "dora everywhere": Kind(8, (*LINEAR, "embed_tokens", "lm_head"), options={"use_dora": True}),
    "saved": Kind(8, ("o_proj",), options={"modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved after": Kind(8, ("o_proj",), options={"modules_to_save": ["lm_head"]}),
    "trained tokens": Kind(
        8, ("k_proj", "gate_proj"), options={"trainable_token_indices": [7, 300, *range(20, 60)]}
    ),
    "added tokens": Kind(8, ("q_proj", "v_proj"), added_tokens=5),
    "trained added tokens": Kind(
        4, ("up_proj",), added_tokens=3, options={"trainable_token_indices": [320, 321, 322, 5]}
    ),
    "lora over added tokens": Kind(
        8, ("q_proj", "embed_tokens", "lm_head"), added_tokens=7, options={"use_dora": True}
    ),
}
KINDS = {**PLAIN, **VECTORS, **ENDS}


def save_kind(model: PreTrainedModel, folder: Path, kind: Kind, *, seed: int, strength: float = 1.0) -> Path:
    """Save an adapter of a kind, with everything that training would change visibly changed.

    A deep model multiplies rounding errors, and needs less ``strength`` if they are not to decide.
    """
    torch.manual_seed(seed)
    config = LoraConfig(
        r=kind.rank,
        target_modules=list(kind.targets),
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        **{"lora_alpha": 2 * kind.rank, **kind.options},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights that are adapted on one end only.
        wrapped = get_peft_model(_resized(model, kind), config)
        _train(wrapped, strength)
        assert isinstance(wrapped, PeftModel)
        wrapped.save_pretrained(str(folder), save_embedding_layers=bool(kind.added_tokens))
    return folder


def differences(
    model: PreTrainedModel, kinds: Mapping[str, Kind], folders: Mapping[str, Path], answers: Sequence[Answer]
) -> list[Difference]:
    """Every token of ``answers`` that is not PEFT's own, ties included."""
    found = PeftOracle(model, {}).differences([answer for answer in answers if answer.adapter is None])
    for name, folder in folders.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            oracle = PeftOracle(_resized(model, kinds[name]), {name: folder})
        found += oracle.differences([answer for answer in answers if answer.adapter == name])
    return found


def vocab_size(model: PreTrainedModel, kind: Kind | None) -> int:
    """Tokens that the adapter of a kind, or the base model, can read."""
    return model.config.vocab_size + (kind.added_tokens if kind else 0)


def _resized(model: PreTrainedModel, kind: Kind) -> PreTrainedModel:
    """A copy with room for the added tokens; their rows are random."""
    own = copy.deepcopy(model)
    if kind.added_tokens:
        own.resize_token_embeddings(model.config.vocab_size + kind.added_tokens, mean_resizing=False)
        for module in (own.get_input_embeddings(), own.get_output_embeddings()):
            assert isinstance(module, (torch.nn.Embedding, torch.nn.Linear))
            with torch.no_grad():
                module.weight[model.config.vocab_size :].normal_(std=0.3)
    return own


@torch.no_grad()
def _train(model: torch.nn.Module, strength: float) -> None:
    """Give visible values to what PEFT begins with zeros, or with the base's own."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter) * strength
        if "lora_magnitude_vector" in name:
            parameter.mul_(1 + 0.3 * noise)
        elif "lora_embedding_B" in name:
            parameter.mul_(0.1)  # PEFT begins with numbers of size 1, many times those of an embedding.
        elif "lora_B" in name and name.endswith("bias"):
            parameter.copy_(0.2 * noise)
        elif "trainable_tokens_delta" in name:
            parameter.add_(0.3 * noise)
        elif "modules_to_save" in name:
            parameter[::3] += 0.2 * noise[::3]
