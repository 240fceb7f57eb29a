"""What a model's files say, and what is refused of it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from transformers import LlamaConfig

from engine.model.config import ModelConfig, parse_hf_config
from engine.model.errors import UnsupportedModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}


def parse(max_model_len: int | None = None, **changes: Any) -> ModelConfig:
    return parse_hf_config({**LLAMA, **changes}, {}, max_model_len=max_model_len)


def test_shapes_and_defaults() -> None:
    config = parse()
    assert config.head_dim == 8
    assert config.modules["k_proj"] == (32, 16)
    assert config.modules["down_proj"] == (48, 32)
    assert config.group_splits("qkv") == (0, 32, 48, 64)
    assert config.group_in("down") == 48
    assert config.rope.theta == 10000.0
    assert not config.tie_word_embeddings
    assert config.max_model_len == 4096
    assert parse(max_model_len=100).max_model_len == 100


def test_generation_config_names_the_end_tokens() -> None:
    assert parse().eos_token_ids == (7,)
    config = parse_hf_config(LLAMA, {"eos_token_id": [7, 9]}, max_model_len=None)
    assert config.eos_token_ids == (7, 9)
    beyond = parse_hf_config(LLAMA, {"eos_token_id": [100, 7, -1, 7]}, max_model_len=None)
    assert beyond.eos_token_ids == (7,), (
        "a ban of a token beyond the vocabulary would write beyond the logits"
    )


def test_old_and_new_spelling_of_rope_agree() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    old = parse(rope_theta=500000.0, rope_scaling=scaling)
    assert old.rope == parse(rope_parameters={**scaling, "rope_theta": 500000.0}).rope
    assert parse(rope_theta=500000.0, rope_scaling=None).rope.theta == 500000.0


def test_of_what_files_say_twice_that_counts_which_transformers_takes() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    linear = {"rope_type": "linear", "factor": 2.0}
    cases: list[dict[str, Any]] = [
        {"rope_scaling": yarn, "original_max_position_embeddings": 1024},
        {"rope_scaling": linear, "rope_parameters": yarn},
    ]
    for fields in cases:
        theirs: Any = LlamaConfig(**deepcopy(fields))
        theirs.standardize_rope_params()  # as its model does
        stated, ours = theirs.rope_parameters, parse(**fields).rope
        assert ours.kind == stated["rope_type"]
        assert ours.original_max_len == stated.get("original_max_position_embeddings", 0)


def test_yarn_stretches_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert parse(rope_scaling=yarn).max_model_len == 8192
    assert parse(rope_scaling={**yarn, "factor": 1.5}).max_model_len == 4096
    assert parse(rope_scaling={"rope_type": "yarn", "factor": 2.0}).max_model_len == 8192


def test_a_sliding_window_limits_the_context() -> None:
    mistral = ["MistralForCausalLM"]
    assert parse(architectures=mistral, sliding_window=1024).max_model_len == 1024
    assert parse(architectures=mistral, sliding_window=None).max_model_len == 4096
    qwen = ["Qwen2ForCausalLM"]
    assert parse(architectures=qwen, sliding_window=1024).max_model_len == 4096
    config = parse(architectures=qwen, sliding_window=1024, use_sliding_window=True)
    assert config.max_model_len == 1024


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"max_model_len": 5000}, "--max-model-len 5000"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "4 heads of 8 over 3"),
        ({"head_dim": 7}, "4 heads of 7"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse(**changes)


def test_a_missing_field_is_named() -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    with pytest.raises(UnsupportedModel, match="rms_norm_eps"):
        parse_hf_config(raw, {}, max_model_len=None)
