"""The forward pass against transformers', for each variant of the family, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.batch import build_forward_batch
from engine.kv_cache import KVCache
from engine.model.loading import LoadedModel, load_model
from engine.model.lora_pool import RankPagePool
from engine.step import SamplingParams, StepRow
from tests.model_zoo import save_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "tied": (LlamaForCausalLM, LlamaConfig, {}),
    "untied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "multi-head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama3 rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}},
    ),
    "yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "yarn, all options": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
            }
        },
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3, one group": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 1}),
}


@torch.inference_mode()
def last_logits(model: LoadedModel, prompt: list[int], *, chunk: int) -> torch.Tensor:
    """Logits after the prompt, prefilled in chunks."""
    cache = KVCache(model.config, 8, model.dtype, model.device)
    adapters = RankPagePool(model.config, 1, model.dtype, model.device)
    hidden = torch.empty(0)
    for start in range(0, len(prompt), chunk):
        row = StepRow(
            1, prompt[start : start + chunk], start, (3, 0, 6, 2, 7, 1, 5), sampling=SamplingParams()
        )
        hidden = model.network.forward(build_forward_batch((row,), model.device), cache, adapters)
    return model.network.logits(hidden)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    model_class, config_class, overrides = VARIANTS[variant]
    expected_model = save_tiny_model(
        tmp_path, model_class=model_class, config_class=config_class, shard_size="40KB", **overrides
    )
    assert (tmp_path / "model.safetensors.index.json").exists(), "shards are part of what is tested"
    model = load_model(str(tmp_path), dtype="float32", device="cpu", max_model_len=None)
    prompt = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = expected_model(prompt[None]).logits[0, -1:]
    actual = last_logits(model, prompt.tolist(), chunk=37)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    expected_model = save_tiny_model(tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16", device="cpu", max_model_len=None)
    prompt = torch.randint(0, 320, (50,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = expected_model(prompt[None]).logits[0, -1:]
    actual = last_logits(model, prompt.tolist(), chunk=50).float()
    assert torch.nn.functional.cosine_similarity(actual, expected).item() > 0.995
