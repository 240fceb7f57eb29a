"""Runs one step on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from engine.adapter_copies import AdapterCopies
from engine.batch import build_forward_batch
from engine.drawn_tokens import DrawnTokens
from engine.graphs import StepGraphs
from engine.kv_cache import KVCache
from engine.launched_step import LaunchedStep
from engine.model.adapter_ends import ResidentEnds, StepEnds
from engine.model.adapter_weights import HostAdapter, pages_of_rank
from engine.model.llama import ForwardBatch
from engine.model.loading import LoadedModel
from engine.model.lora_pool import RankPagePool
from engine.pooling import PendingVectors, pooled_tokens
from engine.prompt_logprobs import PendingScores
from engine.sampler import PendingDraw, Sampler
from engine.step import UNSEEN, StepPlan, StepResult, StepRow
from engine.transfer import Readback
from engine.warm_up import StepSizes, warm_up_steps
from kernels.plans import RANK_PAGE


class Runner:
    """Everything between a step's plan and its tokens.

    Owns the KV tensors and the rank pages; which of them a sequence may use is the scheduler's knowledge and
    comes with each plan. Not thread-safe: the loop's thread calls it.

    Args:
        max_lora_rank: the widest adapter that compiled kernels are made ready for; a step with a wider one
            works, but the first waits for their compilation.
        num_threads: CPU threads of torch and of the kernels; None leaves torch's own choice. It is a
            setting of the process.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        num_rank_pages: int,
        max_lora_rank: int = RANK_PAGE,
        num_threads: int | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._network = model.network
        self._max_model_len = model.config.max_model_len
        self._num_blocks = num_blocks
        self._device = model.device
        max_pages = min(num_rank_pages, pages_of_rank(max_lora_rank))
        self._page_widths = sorted({1, max_pages}) if max_pages else []
        self._graphs: StepGraphs | None = None
        self._cache = KVCache(model.config, num_blocks, model.dtype, model.device)
        self._adapters = RankPagePool(model.config, num_rank_pages, model.dtype, model.device)
        self._ends = ResidentEnds(model.device)
        self._adapter_copies = AdapterCopies(model.device)
        self._sampler = Sampler(model.device)
        self._score_readback = Readback(model.device)
        self._drawn: DrawnTokens | None = None

    def warm_up(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Run the largest prefill and the largest decode once, before serving; on a GPU, steps of all kinds.

        Kernels are compiled and the largest buffers allocated here, so that no request waits for it and
        too little memory shows at the start. What it writes to blocks and pages is never read.
        """
        sizes = StepSizes(
            num_blocks=self._num_blocks,
            max_model_len=self._max_model_len,
            vocab_size=self._network.config.vocab_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        on_gpu = self._device.type == "cuda"
        for plan in warm_up_steps(sizes, self._page_widths, on_gpu=on_gpu):
            self.execute(plan)
        if on_gpu:
            self._rehearse_logits(max_num_seqs)

    @torch.inference_mode()
    def _rehearse_logits(self, max_num_seqs: int) -> None:
        """Which of cuBLAS's kernels makes the logits depends on how many rows there are, and to load one
        holds the host up for 16 ms. All other products of decodes have the sizes of graphs.
        """
        hidden = torch.zeros(
            (max_num_seqs, self._network.config.hidden_size), dtype=self._network.dtype, device=self._device
        )
        for count in range(1, max_num_seqs + 1):
            self._network.logits(hidden[:count])

    def capture_graphs(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Capture steps of up to ``max_num_seqs`` rows as CUDA graphs, and run them so from now on.

        Takes device memory, for good. Call it after `warm_up`.
        """
        self._graphs = self._make_graphs(max_num_seqs, max_num_batched_tokens)
        self._graphs.capture()

    def rehearse_graphs(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Need every kernel that `capture_graphs` needs, and keep nothing."""
        self._make_graphs(max_num_seqs, max_num_batched_tokens).rehearse()

    def estimate_graphs(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Bytes of device memory that `capture_graphs` would take. Call it after `warm_up`."""
        return self._make_graphs(max_num_seqs, max_num_batched_tokens).estimate()

    def _make_graphs(self, max_num_seqs: int, max_num_batched_tokens: int) -> StepGraphs:
        return StepGraphs(
            self._forward,
            self._forward_first_layer,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_context_len=self._max_model_len,
            page_widths=self._page_widths,
            device=self._device,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """`submit`, and its result."""
        return self.submit(plan).result()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> LaunchedStep:
        """Launch one forward pass over ``plan.rows``, and the draw of a token for each row that samples.

        The draw is left to `LaunchedStep.draw` where what a row may draw follows from a token that the host
        has not read. Returns what the result can be had from; on a GPU, while the device still works. Steps
        run in the order of their launch. Tokens that are `UNSEEN` are those that the step launched last has
        drawn. Writes the rows' own slots of the KV cache, and nothing else that outlives the step.
        """
        drawn, self._drawn = self._drawn, None
        self._adapter_copies.wait_for(plan.rows)
        self._cache.copy_blocks(plan.block_copies)
        ends = self._ends.of(plan.rows)
        scored = [row for row in plan.rows if row.scoring is not None]
        pooled = [row for row in plan.rows if row.pooling is not None]
        graphs = None if scored or pooled else self._graphs
        hidden = None if graphs is None else graphs.run(plan.rows, drawn)
        if hidden is None:
            hidden = self._forward(self._build_batch(plan.rows, ends, drawn))
        sampling = [row for row in plan.rows if row.sampling is not None]
        scores = self._score_prompts(scored, hidden, ends, len(sampling)) if scored else None
        vectors = self._pool_prompts(pooled, hidden) if pooled else None
        if not sampling:
            return LaunchedStep(None, scores, vectors)
        if scored or pooled:
            hidden, ends = hidden[: len(sampling)], ends and ends.part(0, len(sampling))
        logits = self._network.logits(hidden, ends)
        step = LaunchedStep(partial(self._draw, logits, sampling, drawn), scores, vectors)
        if not any(row.constraint is not None and row.tokens[0] == UNSEEN for row in sampling):
            step.draw()
        return step

    @torch.inference_mode()
    def _draw(self, logits: torch.Tensor, rows: Sequence[StepRow], drawn: DrawnTokens | None) -> PendingDraw:
        pending, self._drawn = self._sampler.draw(logits, rows, drawn)
        return pending

    def _score_prompts(
        self, rows: Sequence[StepRow], hidden: torch.Tensor, ends: StepEnds | None, first: int
    ) -> PendingScores:
        """Launch the logprobs of prompts. ``hidden`` of their tokens begins at ``first``."""

        def logits_of(start: int, stop: int) -> torch.Tensor:
            start, stop = first + start, first + stop
            return self._network.logits(hidden[start:stop], ends and ends.part(start, stop))

        width = max(self._network.config.vocab_size, ends.vocab_size if ends else 0)
        return PendingScores(rows, logits_of, width, self._score_readback)

    def _pool_prompts(self, rows: Sequence[StepRow], hidden: torch.Tensor) -> PendingVectors:
        """Launch the vectors of prompts. ``hidden`` of their tokens comes last."""
        count = sum(len(pooled_tokens(row)) for row in rows)
        return PendingVectors(rows, hidden[len(hidden) - count :], self._score_readback)

    @torch.inference_mode()
    def write_adapter(self, pages: Sequence[int], adapter: HostAdapter) -> Callable[[], bool]:
        """Start to put an adapter into rank pages that no running sequence references.

        On a GPU the copy runs beside the steps that come after, but behind those launched before: rows of
        sequences that have ended may still read the pages. A step that reads what is not there yet waits for
        it on the device, and all of it with it; so better let no sequence start before.

        Returns: whether the adapter is there now.
        """
        with self._adapter_copies.copying(pages) as landed:
            self._adapters.write(pages, adapter)
            self._ends.write(pages, adapter.ends)
        return landed

    def drop_adapter(self, pages: Sequence[int]) -> None:
        """Give back what an adapter in ``pages``, which nobody references any more, holds beside them."""
        self._ends.drop(pages)

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self._network.forward(batch, self._cache, self._adapters)

    def _forward_first_layer(self, batch: ForwardBatch) -> torch.Tensor:
        return self._network.forward(batch, self._cache, self._adapters, num_layers=1)

    def _build_batch(
        self, rows: Sequence[StepRow], ends: StepEnds | None, drawn: DrawnTokens | None
    ) -> ForwardBatch:
        widths = self._page_widths if self._device.type == "cuda" else ()
        batch = build_forward_batch(rows, self._device, page_widths=widths, drawn=drawn)
        return replace(batch, ends=ends)
