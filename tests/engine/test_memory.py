"""Counts of blocks and pages from the flags."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine import memory
from engine.kv_cache import KVCache, kv_block_bytes
from engine.memory import MemoryLimits, NotEnoughMemory, StepMemory, plan_memory
from engine.model.config import ModelConfig, RopeConfig
from engine.model.lora_pool import RankPagePool, rank_page_bytes

CPU = torch.device("cpu")
GIB = 1 << 30
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    tie_word_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)
LIMITS = MemoryLimits(
    gpu_memory_utilization=0.9,
    kv_cache_memory_bytes=None,
    num_gpu_blocks_override=None,
    lora_memory_bytes=1 << 20,
    max_lora_rank=64,
    step=StepMemory(activations=2 * GIB, graphs=GIB),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_allocated(dtype: torch.dtype) -> None:
    assert KVCache(CONFIG, 3, dtype, CPU).data.nbytes == 3 * kv_block_bytes(CONFIG, dtype)
    pools = RankPagePool(CONFIG, 3, dtype, CPU).layers
    allocated = sum(p.a.nbytes + p.b.nbytes + p.scales.nbytes for layer in pools for p in layer)
    assert allocated == 3 * rank_page_bytes(CONFIG, dtype)


def test_flags_decide_in_order(caplog: pytest.LogCaptureFixture) -> None:
    block = kv_block_bytes(CONFIG, torch.float32)
    page = rank_page_bytes(CONFIG, torch.float32)
    given = replace(LIMITS, kv_cache_memory_bytes=100 * block + 1, lora_memory_bytes=7 * page + 1)
    with caplog.at_level(logging.INFO):
        plan = plan_memory(CONFIG, torch.float32, CPU, given)
    assert (plan.num_blocks, plan.num_rank_pages) == (100, 7)
    assert "1600 tokens" in caplog.text and "7 adapters of rank 16" in caplog.text
    assert plan.ends_bytes == given.lora_memory_bytes // 4
    override = replace(given, num_gpu_blocks_override=5)
    assert plan_memory(CONFIG, torch.float32, CPU, override).num_blocks == 5


def test_cpu_default_is_a_gibibyte_or_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    block = kv_block_bytes(CONFIG, torch.float32)
    monkeypatch.setattr(memory, "available_ram", lambda: 64 * GIB)
    assert plan_memory(CONFIG, torch.float32, CPU, LIMITS).num_blocks * block == pytest.approx(GIB, rel=0.01)
    monkeypatch.setattr(memory, "available_ram", lambda: GIB // 2)
    plan = plan_memory(CONFIG, torch.float32, CPU, LIMITS)
    adapters = plan.num_rank_pages * rank_page_bytes(CONFIG, torch.float32) + plan.ends_bytes
    assert 0 <= 0.9 * GIB / 2 - plan.num_blocks * block - adapters < 2 * block


def test_gpu_takes_its_share_less_what_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    cuda = SimpleNamespace(type="cuda")
    with caplog.at_level(logging.INFO):
        plan = plan_memory(CONFIG, torch.float32, cuda, LIMITS)  # type: ignore[arg-type]
    used = plan.num_blocks * kv_block_bytes(CONFIG, torch.float32)
    assert used == pytest.approx((0.9 * 80 - 30 - 3) * GIB, rel=0.001)
    assert "activations 2.00 GiB, CUDA graphs 1.00 GiB" in caplog.text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora_memory_bytes": 1000}, "--lora-memory-bytes"),
        ({"kv_cache_memory_bytes": 1000}, "--max-model-len"),
        ({"num_gpu_blocks_override": 3}, "48 tokens.*or raise --num-gpu-blocks-override"),
    ],
)
def test_too_little_names_the_flag(changes: dict[str, int], named: str) -> None:
    with pytest.raises(NotEnoughMemory, match=named):
        plan_memory(CONFIG, torch.float32, CPU, replace(LIMITS, **changes))
