"""How many KV blocks and rank pages the memory is worth."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.host_memory import available_ram
from engine.kv_cache import kv_block_bytes
from engine.model.adapter_weights import pages_of_rank
from engine.model.config import ModelConfig
from engine.model.lora_pool import rank_page_bytes
from kernels.plans import BLOCK_SIZE, RANK_PAGE

_log = logging.getLogger(__name__)

_GIB = 1 << 30
_PAGES_TO_ENDS = 4
"""Few adapters change the embedding or ``lm_head``, and of those, most a few rows."""
_CPU_KV_BYTES = 1 * _GIB
"""A CPU's default: its memory is also everybody else's, so a share of it would be a bad neighbour."""


class NotEnoughMemory(Exception):
    """The memory allowed does not hold one request or one adapter; the message names the flag to change."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What steps take of a GPU beside weights, pages and blocks, in bytes; see ``engine.step_memory``."""

    activations: int
    graphs: int


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What the flags say, in bytes unless named otherwise; None: not given.

    Attributes:
        step: on a GPU, what was measured of its steps.
    """

    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    lora_memory_bytes: int
    max_lora_rank: int
    step: StepMemory | None = None

    @property
    def ends_bytes(self) -> int:
        """What adapters may hold beside their pages, for the embedding and ``lm_head``."""
        return self.lora_memory_bytes // _PAGES_TO_ENDS


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Counts of what is allocated once, at the start, and a bound for what comes with adapters.

    Attributes:
        ends_bytes: of what adapters on the device hold beside their pages.
    """

    num_blocks: int
    num_rank_pages: int
    ends_bytes: int


def plan_memory(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, limits: MemoryLimits
) -> MemoryPlan:
    """Size the KV cache and the rank pages, once the weights are on the device; logs what fits.

    Rank pages take ``lora_memory_bytes``, and a quarter as much stays free for what adapters hold beside
    them. Blocks are counted by, in this order, the override, the bytes given, or what is left: on a GPU the
    utilization's share of all memory less what is in use and what steps and their graphs need; on a CPU
    1 GiB, or less if less is free.

    Raises:
        NotEnoughMemory: an adapter of ``max_lora_rank`` or a request of ``max_model_len`` would not fit.
    """
    page_bytes, block_bytes = rank_page_bytes(config, dtype), kv_block_bytes(config, dtype)
    num_pages = limits.lora_memory_bytes // page_bytes
    needed_pages = pages_of_rank(limits.max_lora_rank)
    if num_pages < needed_pages:
        raise NotEnoughMemory(
            f"--lora-memory-bytes {limits.lora_memory_bytes} has no room for rank {limits.max_lora_rank}, "
            f"which needs {needed_pages * page_bytes}; raise it or lower --max-lora-rank."
        )
    if limits.num_gpu_blocks_override is not None:
        num_blocks = limits.num_gpu_blocks_override
    else:
        kv_bytes = limits.kv_cache_memory_bytes
        if kv_bytes is None:
            kv_bytes = _memory_left(device, limits) - num_pages * page_bytes
            kv_bytes -= limits.ends_bytes
        num_blocks = kv_bytes // block_bytes
    needed_blocks = -(-config.max_model_len // BLOCK_SIZE)
    if num_blocks < needed_blocks:
        raise NotEnoughMemory(
            f"The KV cache would hold {max(0, num_blocks) * BLOCK_SIZE} tokens, less than one request of "
            f"{config.max_model_len}, which needs {needed_blocks} blocks or {needed_blocks * block_bytes} "
            f"bytes; lower --max-model-len or raise {_flag_of_blocks(limits)}."
        )
    _log.info(
        "KV cache: %d blocks of %d tokens, %d tokens in all (%.2f GiB); adapters: %d rank pages (%.2f GiB), "
        "that is %d adapters of rank %d or less, and up to %.2f GiB for their embeddings and lm_heads",
        num_blocks,
        BLOCK_SIZE,
        num_blocks * BLOCK_SIZE,
        num_blocks * block_bytes / _GIB,
        num_pages,
        num_pages * page_bytes / _GIB,
        num_pages,
        RANK_PAGE,
        limits.ends_bytes / _GIB,
    )
    return MemoryPlan(num_blocks, num_pages, limits.ends_bytes)


def _flag_of_blocks(limits: MemoryLimits) -> str:
    """The flag that has decided how many blocks there are, or could."""
    if limits.num_gpu_blocks_override is not None:
        return "--num-gpu-blocks-override"
    if limits.kv_cache_memory_bytes is not None:
        return "--kv-cache-memory-bytes"
    return "--kv-cache-memory-bytes or --gpu-memory-utilization"


def _memory_left(device: torch.device, limits: MemoryLimits) -> int:
    """Bytes for KV and adapters together."""
    if device.type == "cuda":
        assert limits.step is not None, "a GPU's steps are measured first"
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * limits.gpu_memory_utilization)
        _log.info(
            "GPU memory: %.2f GiB of %.2f GiB may be used; weights and what else is there take %.2f GiB, a "
            "step's activations %.2f GiB, CUDA graphs %.2f GiB",
            allowed / _GIB,
            total / _GIB,
            (total - free) / _GIB,
            limits.step.activations / _GIB,
            limits.step.graphs / _GIB,
        )
        return allowed - (total - free) - limits.step.activations - limits.step.graphs
    wanted = _CPU_KV_BYTES + limits.lora_memory_bytes + limits.ends_bytes
    return min(wanted, int(available_ram() * limits.gpu_memory_utilization))
