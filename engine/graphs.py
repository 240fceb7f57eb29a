"""CUDA graphs of steps.

The host takes longer to launch a step's several hundred kernels than the device to run them, unless there are
thousands of tokens in it. A graph is all of them in one launch. It is bound to the addresses and launch sizes
of its capture, so there is one for each of some sizes, without LoRA and for narrow and wide adapters, over
buffers that stay where they are. A step runs in the smallest graph that holds it, and the rest of that is
padding. Pure decode steps, which are nearly all, have graphs and buffers of their own.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from engine.decode_inputs import DecodeInputs
from engine.drawn_tokens import DrawnTokens
from engine.mixed_inputs import MixedInputs
from engine.model.llama import ForwardBatch
from engine.step import StepRow

_log = logging.getLogger(__name__)

_MIXED_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of a mixed step. Beyond the last the device takes longer than the host, which launches a step with
adapters in 22 to 45 ms, and padding would cost more than it saves."""

Forward = Callable[[ForwardBatch], torch.Tensor]
"""The network over one cache and one pool of adapters: a batch to the hidden states of its output rows."""


def captured_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that graphs are made for: close together where a row of padding weighs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """The numbers of tokens that graphs of mixed steps are made for."""
    return [size for size in _MIXED_SIZES if size <= max_num_batched_tokens]


class _Inputs(Protocol):
    """Buffers for the steps of one kind; see `DecodeInputs`."""

    def fits(self, rows: Sequence[StepRow]) -> bool: ...
    def size_of(self, rows: Sequence[StepRow]) -> int: ...
    def write(self, rows: Sequence[StepRow], drawn: DrawnTokens | None) -> int: ...
    def batch(self, size: int, *, page_width: int) -> ForwardBatch: ...


class StepGraphs:
    """Runs steps as graphs, whatever adapters they have.

    Args:
        forward: what is captured. The caches and pools that it works on must never move.
        rehearse: needs every kernel that ``forward`` needs.
        page_widths: ascending; rank pages of the widest adapter in a step, for each of which there are
            graphs. A step with a wider one does not run here.
    """

    def __init__(
        self,
        forward: Forward,
        rehearse: Forward,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_context_len: int,
        page_widths: Sequence[int],
        device: torch.device,
    ) -> None:
        mixed = mixed_sizes(max_num_batched_tokens)
        common: dict[str, Any] = {
            "max_rows": max_num_seqs,
            "max_context_len": max_context_len,
            "page_widths": page_widths,
            "device": device,
        }
        families: list[_Family] = []
        if mixed:
            inputs = MixedInputs(max_tokens=mixed[-1], **common)
            families.append(_Family(forward, rehearse, inputs, mixed, device))
        sizes = captured_sizes(max_num_seqs)
        families.append(_Family(forward, rehearse, DecodeInputs(**common), sizes, device))
        self._families = families  # those with the largest steps first
        self._widths = (0, *page_widths)
        self._device = device

    def run(self, rows: Sequence[StepRow], drawn: DrawnTokens | None) -> torch.Tensor | None:
        """The hidden states of the rows that sample, [S, H], valid until the next run.

        Launches only: the host does not wait for the device. None: no graph holds the step.
        """
        for family in reversed(self._families):
            if family.inputs.fits(rows):
                return family.run(rows, drawn)
        return None

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all of them. Takes device memory, for as long as this object lives."""
        began, free = time.monotonic(), self._free_bytes()
        self.rehearse()
        taken = free - torch.cuda.mem_get_info(self._device)[0]
        _log.info(
            "captured %d CUDA graphs in %.1f s; they take %.2f GiB",
            self._num_graphs(),
            time.monotonic() - began,
            taken / (1 << 30),
        )

    @torch.inference_mode()
    def rehearse(self) -> None:
        """`capture`, for the sake of the kernels that it needs."""
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others' activations then fit into the memory that it has taken.
        for family in self._families:
            family.capture(family.sizes, self._widths, pool)
            family.replay()

    @torch.inference_mode()
    def estimate(self) -> int:
        """Bytes that all of them would take: the activations of the largest, and what each takes beside.

        Captures some of them, which go with this object.
        """
        total = sum(len(family.sizes) for family in self._families) * len(self._widths)
        free, pool = self._free_bytes(), torch.cuda.graph_pool_handle()
        for family in self._families:
            family.capture(family.sizes[-1:], self._widths, pool)
        free_with_largest, num_largest = torch.cuda.mem_get_info(self._device)[0], self._num_graphs()
        for family in self._families:
            family.capture(family.sizes[:-1][:2], self._widths, pool)
        num_more = max(1, self._num_graphs() - num_largest)
        each = (free_with_largest - torch.cuda.mem_get_info(self._device)[0]) / num_more
        return int(free - free_with_largest + each * (total - num_largest))

    def _free_bytes(self) -> int:
        """Free memory of the device, without what is cached of earlier work: capturing gives that back."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def _num_graphs(self) -> int:
        return sum(len(family.graphs) for family in self._families)


class _Family:
    """The graphs of steps of one kind, by size and page width, over one set of buffers."""

    def __init__(
        self,
        forward: Forward,
        rehearse: Forward,
        inputs: _Inputs,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        self.inputs = inputs
        self.sizes = sizes
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._forward = forward
        self._rehearse = rehearse
        self._device = device

    def run(self, rows: Sequence[StepRow], drawn: DrawnTokens | None) -> torch.Tensor:
        page_width = self.inputs.write(rows, drawn)
        size = self.sizes[bisect_left(self.sizes, self.inputs.size_of(rows))]
        graph, hidden = self.graphs[size, page_width]
        graph.replay()
        return hidden[: sum(row.sampling is not None for row in rows)]

    def replay(self) -> None:
        """Run all graphs: to run one for the first time may hold the host up for milliseconds."""
        for graph, _ in self.graphs.values():
            graph.replay()

    def capture(self, sizes: Sequence[int], page_widths: Sequence[int], pool: Any) -> None:
        """Capture a graph for each of ``sizes``, the largest first, and each page width."""
        for size in reversed(sizes):
            for width in page_widths:
                # So that nothing is compiled, loaded or looked up under capture.
                self._rehearse(self.inputs.batch(size, page_width=width))
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                with _uncollected(), torch.cuda.graph(graph, pool=pool):
                    hidden = self._forward(self.inputs.batch(size, page_width=width))
                self.graphs[size, width] = graph, hidden


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which may come upon a graph of an earlier runner: to free one while another
    is captured makes the capture fail.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
