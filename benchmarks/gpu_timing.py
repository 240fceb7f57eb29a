"""Timing on a GPU: CUDA graph replays, medians, and the copy bandwidth that everything is held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what ``work`` launches; run twice before, so that compilation stays out of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(
    graph: torch.cuda.CUDAGraph, before: Callable[[int], object] | None = None, repeats: int = 25
) -> float:
    """Median milliseconds of a replay. ``before(i)`` runs ahead of replay i, outside its time."""
    times = []
    for i in range(repeats + 3):
        if before is not None:
            before(i)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_ms(
    work: Callable[[], object], before: Callable[[int], object] | None = None, repeats: int = 25
) -> float:
    """``replay_ms`` of a graph that is captured for it and dropped."""
    graph = capture(work)
    result = replay_ms(graph, before, repeats)
    graph.reset()
    return result


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 4 GiB, bytes read and written both counted."""
    source = torch.randint(-100, 100, (1 << 30,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.nbytes / statistics.median(times) / 1e9


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got - want‖ / ‖want‖ in float64; NaN stays NaN."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm())
