"""CUDA graphs of decode steps.

The host takes longer to launch a decode step's several hundred kernels than the device to run them. A graph
is all of them in one launch. It is bound to the addresses and launch sizes of its capture, so there is one
for each of some batch sizes, without LoRA and for narrow and wide adapters, over buffers that stay where they
are. A step runs in the smallest graph that holds it, and the rest of that is padding.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.decode_inputs import DecodeInputs
from engine.drawn_tokens import DrawnTokens
from engine.model.llama import ForwardBatch
from engine.step import StepRow

_log = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch], torch.Tensor]
"""The network over one cache and one pool of adapters: a batch to the hidden states of its output rows."""


def captured_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that graphs are made for: close together where a row of padding weighs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Runs pure decode steps as graphs, whatever adapters they have.

    Args:
        forward: what is captured. The caches and pools that it works on must never move.
        page_widths: ascending; rank pages of the widest adapter in a step, for each of which there are
            graphs. A step with a wider one does not run here.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_num_seqs: int,
        max_context_len: int,
        page_widths: Sequence[int],
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._sizes = captured_sizes(max_num_seqs)
        self._inputs = DecodeInputs(
            max_rows=max_num_seqs, max_context_len=max_context_len, page_widths=page_widths, device=device
        )
        self._device = device
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._capture_all((0, *page_widths))

    def can_run(self, rows: Sequence[StepRow]) -> bool:
        """Whether each row is one token that samples, and none is more than was captured for."""
        return self._inputs.fits(rows)

    def run(self, rows: Sequence[StepRow], drawn: DrawnTokens | None) -> torch.Tensor:
        """The hidden states of a step that can run, [len(rows), H], valid until the next run.

        Launches only: the host does not wait for the device.
        """
        page_width = self._inputs.write(rows, drawn)
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        graph, hidden = self._graphs[size, page_width]
        graph.replay()
        return hidden[: len(rows)]

    @torch.inference_mode()
    def _capture_all(self, page_widths: Sequence[int]) -> None:
        # Capturing does it anyway, and then what the warm-up left behind would be taken for the graphs' own.
        torch.cuda.empty_cache()
        began, (free, _) = time.monotonic(), torch.cuda.mem_get_info(self._device)
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others' activations then fit into the memory that it has taken.
        for size in reversed(self._sizes):
            for width in page_widths:
                self._graphs[size, width] = self._capture(size, width, pool)
        taken = free - torch.cuda.mem_get_info(self._device)[0]
        _log.info(
            "captured %d CUDA graphs of decode steps up to %d sequences in %.1f s; they take %.2f GiB",
            len(self._graphs),
            self._sizes[-1],
            time.monotonic() - began,
            taken / (1 << 30),
        )

    def _capture(self, size: int, page_width: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        # Once before, so that nothing is compiled, loaded or looked up under capture.
        self._forward(self._inputs.batch(size, page_width=page_width))
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = self._forward(self._inputs.batch(size, page_width=page_width))
        return graph, hidden
