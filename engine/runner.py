"""Runs one step on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import build_forward_batch
from engine.kv_cache import KVCache
from engine.model.adapter_weights import HostAdapter
from engine.model.loading import LoadedModel
from engine.model.lora_pool import RankPagePool
from engine.sampler import draw
from engine.step import StepPlan, StepResult


class Runner:
    """Everything between a step's plan and its tokens.

    Owns the KV tensors and the rank pages; which of them a sequence may use is the scheduler's knowledge and
    comes with each plan. Not thread-safe: the loop's thread calls it.

    Args:
        num_threads: CPU threads of torch and of the kernels; None leaves torch's own choice. It is a
            setting of the process.
    """

    def __init__(
        self, model: LoadedModel, *, num_blocks: int, num_rank_pages: int, num_threads: int | None = None
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._network = model.network
        self._device = model.device
        self._cache = KVCache(model.config, num_blocks, model.dtype, model.device)
        self._adapters = RankPagePool(model.config, num_rank_pages, model.dtype, model.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass over ``plan.rows``, and a token for each row that samples.

        Writes the rows' own slots of the KV cache, and nothing else that outlives the call.
        """
        self._cache.copy_blocks(plan.block_copies)
        batch = build_forward_batch(plan.rows, self._device)
        hidden = self._network.forward(batch, self._cache, self._adapters)
        if len(hidden) == 0:
            return StepResult()
        return draw(self._network.logits(hidden), plan.rows)

    @torch.inference_mode()
    def write_adapter(self, pages: Sequence[int], adapter: HostAdapter) -> None:
        """Put an adapter into rank pages that no running sequence references, between two steps."""
        self._adapters.write(pages, adapter)
