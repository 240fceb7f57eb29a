"""Offline throughput of the engine on a GPU: the real scheduler, loop and runner, without gRPC.

    python -m benchmarks.gpu_throughput --out results.json

Random weights of Llama-3.1-8B's shape in bfloat16; 256 requests of 512 distinct random prompt tokens and 128
greedy output tokens, at most 256 at once, no prefix caching; adapters of rank 16 on all seven projections, in
turn over the requests. For each number of adapters: prefill (the same prompts, one token each), throughput,
and the decode step at a context near 576 for batches of 1, 32, 128 and 256, as the loop sees it; beside it
the part that the device spends in the captured graph. "64 in 8" has rank pages for 8 adapters only.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import statistics
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_decode import LLAMA_8B, RandomWeights, floor_ms
from benchmarks.gpu_timing import copy_bandwidth
from engine.__main__ import prepare_process
from engine.adapter_tiers import AdapterTiers
from engine.block_pool import BlockPool
from engine.loop import EngineLoop, PendingResult
from engine.model.adapter_weights import GroupWeights, HostAdapter
from engine.model.config import PROJECTION_GROUPS
from engine.model.llama import LlamaModel
from engine.model.loading import LoadedModel
from engine.outputs import LinkOutput
from engine.rank_pages import RankPages
from engine.runner import Runner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.sequence import Request
from engine.step import SamplingParams, StepPlan
from engine.step_memory import measure_step_memory
from engine.transfer import lock_host_memory
from kernels.plans import RANK_PAGE

NUM_REQUESTS, PROMPT, OUTPUT = 256, 512, 128
STEP_PROMPT, STEP_OUTPUT = 544, 48
STEP_SIZES = (1, 32, 128)
NUM_BLOCKS = NUM_REQUESTS * (PROMPT + OUTPUT) // 16 + 256
MAX_NUM_SEQS = 256
SPREAD_PROMPTS = 256
"""As `engine.assembly`, which needs more than this machine has to have, sets it on a GPU."""


class Case(NamedTuple):
    """Adapters, the rank pages that they may have, and the tenants whose requests come in turn."""

    num_adapters: int
    num_pages: int
    num_tenants: int = 1


CASES = {
    "0": Case(0, 64),
    "8": Case(8, 64),
    "64": Case(64, 64),
    "64 in 8": Case(64, 8),
    "1": Case(1, 64),
    "32": Case(32, 64),
    "64, 4 tenants": Case(64, 64, num_tenants=4),
}
"""In order of interest."""
COLUMNS = ("output", "prefill", "step_1", "step_32", "step_128", "step_256", "graph_256")
VLLM: dict[str, tuple[float, ...]] = {
    "0": (6917, 43800, 4.88, 5.90, 8.50, 13.70),
    "8": (5141, 33200, 6.83, 9.76, 13.97, 19.13),
    "64": (2838, 21900, 7.88, 19.68, 31.61),
    "64 in 8": (2199,),
    "1": (5538, 35600, 6.63, 7.19, 11.99, 16.89),
    "32": (3843, 26700, 6.79, 18.86, 21.80, 27.43),
}
"""The first of ``COLUMNS`` for vLLM 0.26.0, which knows no tenants, on the same work and kind of machine."""


class TimedRunner:
    """A runner whose decode steps are timed: when each began, its rows, and the time of its graph."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last: tuple[int, float] | None = None
        self.steps: list[tuple[int, float]] = []

    def submit(self, plan: StepPlan) -> PendingResult:
        """Notes the seconds from the launch of a pure decode step to that of the next one of its size."""
        now = time.perf_counter()
        size = len(plan.rows) if all(len(row.tokens) == 1 for row in plan.rows) else 0
        if self._last is not None and size and self._last[0] == size:
            self.steps.append((size, now - self._last[1]))
        self._last = (size, now)
        return self._runner.submit(plan)

    def step_ms(self, size: int) -> dict[str, float]:
        """Their median, by the column's name; none where all steps of so many rows held prompts too."""
        times = [seconds for rows, seconds in self.steps if rows == size]
        return {f"step_{size}": 1e3 * statistics.median(times)} if times else {}


class GraphTimes:
    """The device's time in each replay while it is watched."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        replay, events = torch.cuda.CUDAGraph.replay, self._events

        def timed(self: torch.cuda.CUDAGraph) -> None:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay(self)
            end.record()
            events.append((start, end))

        torch.cuda.CUDAGraph.replay = timed
        try:
            yield
        finally:
            torch.cuda.CUDAGraph.replay = replay
            torch.cuda.synchronize()

    def median_ms(self) -> float:
        return statistics.median(start.elapsed_time(end) for start, end in self._events)


class Bench:
    """The model on the device and its runner; every case has a scheduler of its own over them."""

    def __init__(self, max_num_batched_tokens: int, *, num_rank_pages: int = 64) -> None:
        self.limits = SchedulerLimits(MAX_NUM_SEQS, max_num_batched_tokens, spread_prompts=SPREAD_PROMPTS)
        device = torch.device("cuda")
        prepare_process()
        began = time.perf_counter()
        self.model = LoadedModel(
            config=LLAMA_8B,
            network=LlamaModel(LLAMA_8B, RandomWeights(LLAMA_8B), torch.bfloat16, device),
            digest=bytes(32),
            tokenizer_files={},
            dtype=torch.bfloat16,
            device=device,
        )
        torch.cuda.synchronize()
        loaded = time.perf_counter()
        memory = measure_step_memory(
            self.model,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=max_num_batched_tokens,
            max_lora_rank=64,
            has_graphs=True,
        )
        measured = time.perf_counter()
        self.memory_gib = {
            "activations": memory.activations / (1 << 30),
            "graphs_estimated": memory.graphs / (1 << 30),
        }
        self.runner = Runner(
            self.model, num_blocks=NUM_BLOCKS, num_rank_pages=num_rank_pages, max_lora_rank=64
        )
        self.runner.warm_up(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=max_num_batched_tokens)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        warm, (free, _) = time.perf_counter(), torch.cuda.mem_get_info()
        self.runner.capture_graphs(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=max_num_batched_tokens)
        lock_host_memory(device)
        self.memory_gib["graphs"] = (free - torch.cuda.mem_get_info()[0]) / (1 << 30)
        self.seconds = {
            "weights": loaded - began,
            "measure": measured - loaded,
            "warm_up": warm - measured,
            "graphs": time.perf_counter() - warm,
        }
        self.adapter = random_adapter()
        self._rng = random.Random(0)
        gc.collect()
        gc.freeze()  # as an engine does before it serves

    def serve(self, count: int, prompt: int, output: int, case: Case) -> tuple[float, TimedRunner]:
        """Seconds for ``count`` requests that come at once, adapters preloaded if all of them fit."""
        news = threading.Event()
        tiers = AdapterTiers(lambda digest: self.adapter, num_pages=64, host_bytes=1 << 40, wake=news.set)
        gate = AdapterGate(
            RankPages(case.num_pages), tiers, self.runner.write_adapter, self.runner.drop_adapter
        )
        scheduler = Scheduler(self.limits, BlockPool(NUM_BLOCKS, enable_prefix_caching=False), gate)
        runner = TimedRunner(self.runner)
        loop = EngineLoop(scheduler, runner, gate, news, overlap=True)
        digests = [b"%d" % i for i in range(case.num_adapters)] or [b""]
        if case.num_adapters <= case.num_pages:
            preload(gate, digests)
        requests = [
            self.request(i, prompt, output, digests[i % len(digests)], tenant=f"{i % case.num_tenants}")
            for i in range(count)
        ]
        num_ended = 0

        def deliver(outputs: Mapping[Hashable, LinkOutput]) -> None:
            nonlocal num_ended
            for link in outputs.values():
                num_ended += len(link.finished)
                assert not any(finished.error for finished in link.finished), link.finished[:1]

        torch.cuda.synchronize()
        began = time.perf_counter()
        for request in requests:
            scheduler.add(request)
        while num_ended < count:
            if not loop.step(deliver):
                news.wait(0.001)
        seconds = time.perf_counter() - began
        tiers.close()
        return seconds, runner

    def run(self, name: str) -> dict[str, float]:
        """All figures of one case; times in milliseconds, rates in tokens a second."""
        case = CASES[name]
        self.serve(48, 300, 6, case)
        figures: dict[str, float] = {}
        if case.num_adapters <= case.num_pages:
            seconds, _ = self.serve(NUM_REQUESTS, PROMPT, 1, case)
            figures["prefill"] = NUM_REQUESTS * PROMPT / seconds
        graphs = GraphTimes()
        with graphs.watch():
            seconds, runner = self.serve(NUM_REQUESTS, PROMPT, OUTPUT, case)
        figures["output"] = NUM_REQUESTS * OUTPUT / seconds
        if case.num_adapters <= case.num_pages:
            figures |= runner.step_ms(256)
            figures["graph_256"] = graphs.median_ms()
            for size in STEP_SIZES:
                _, runner = self.serve(size, STEP_PROMPT, STEP_OUTPUT, case)
                figures |= runner.step_ms(size)
        return figures

    def request(
        self,
        number: int,
        prompt: int,
        output: int,
        digest: bytes,
        *,
        link: Hashable = "bench",
        tenant: str = "bench",
    ) -> Request:
        """A greedy request over random tokens."""
        return Request(
            link=link,
            request_id=number,
            prompt=[self._rng.randrange(LLAMA_8B.vocab_size) for _ in range(prompt)],
            sampling=(SamplingParams(),),
            max_len=prompt + output,
            block_root=bytes(32),
            adapter_digest=digest,
            tenant=tenant,
            arrival=time.monotonic(),
        )


def random_adapter() -> HostAdapter:
    """An adapter of one page in page-locked memory; all digests share it, in pages of their own."""
    groups = {}
    for group, projections in PROJECTION_GROUPS.items():
        layers, width, out = LLAMA_8B.num_layers, LLAMA_8B.group_in(group), LLAMA_8B.group_splits(group)[-1]
        a = torch.randn(layers, 1, len(projections), RANK_PAGE, width, device="cuda") / width**0.5
        b = torch.randn(layers, 1, RANK_PAGE, out, device="cuda") * 0.02
        groups[group] = GroupWeights(
            a=a.bfloat16().cpu().pin_memory(),
            b=b.bfloat16().cpu().pin_memory(),
            scales=torch.ones(layers, 1, len(projections)).pin_memory(),
        )
    nbytes = sum(weights.a.nbytes + weights.b.nbytes for weights in groups.values())
    return HostAdapter(rank=RANK_PAGE, num_pages=1, nbytes=nbytes, groups=groups)


def preload(gate: AdapterGate, digests: Sequence[bytes]) -> None:
    """Bring adapters to the device before anything is timed."""
    missing = {digest for digest in digests if digest}
    for digest in list(missing):
        answer: Future[str] = Future()
        answer.add_done_callback(lambda _, digest=digest: missing.discard(digest))
        gate.prefetch(digest, answer)
    while missing:
        gate.begin_step(lambda digest: 0, idle=True)
        time.sleep(0.001)


def floors(name: str, bandwidth: float) -> dict[str, float]:
    """Milliseconds that the bytes of each step would take, by column."""
    num_adapters = CASES[name].num_adapters
    return {
        f"step_{size}": floor_ms(LLAMA_8B, size, min(num_adapters, size), bandwidth)
        for size in (*STEP_SIZES, MAX_NUM_SEQS)
    }


def table(report: Mapping[str, Mapping[str, float]], bandwidth: float) -> str:
    """Each case's figures, with vLLM's in brackets, and below them the steps' floors."""
    lines = [f"{'adapters':>8} " + " ".join(f"{column:>17}" for column in COLUMNS)]
    for name, figures in report.items():
        cells = []
        for i, column in enumerate(COLUMNS):
            digits = 0 if column in ("output", "prefill") else 2
            ours = f"{figures[column]:.{digits}f}" if column in figures else "-"
            theirs = VLLM.get(name, ())[i : i + 1]
            cells.append(f"{ours} ({theirs[0]:.{digits}f})" if theirs else ours)
        lines.append(f"{name:>8} " + " ".join(f"{cell:>17}" for cell in cells))
        if "prefill" not in figures:
            continue
        below = floors(name, bandwidth)
        cells = [f"{below[column]:.2f}" if column in below else "" for column in COLUMNS]
        lines.append(f"{'floor':>8} " + " ".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_throughput.json"))
    parser.add_argument("--budget-seconds", type=float, default=600.0, help="start no case after so long")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="the engine's flag")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    began = time.monotonic()
    bandwidth = copy_bandwidth()
    bench = Bench(options.max_num_batched_tokens)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "copy_tb_s": bandwidth,
        "floor_ms": {name: floors(name, bandwidth) for name in options.cases},
        "memory_gib": bench.memory_gib,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "ready_seconds": bench.seconds,
        "vllm": {name: dict(zip(COLUMNS, values, strict=False)) for name, values in VLLM.items()},
        "cases": {},
    }
    print(f"copy {bandwidth:.2f} TB/s; ready: {bench.seconds}; GiB: {bench.memory_gib}", flush=True)
    for name in options.cases:
        if time.monotonic() - began > options.budget_seconds:
            break
        report["cases"][name] = bench.run(name)
        print(f"{time.monotonic() - began:6.1f} s  {name}: {report['cases'][name]}", flush=True)
        options.out.write_text(json.dumps(report, indent=1))
    options.out.write_text(json.dumps(report, indent=1))
    print("tokens a second; a step in milliseconds, graph: the device's part; (vLLM 0.26.0)")
    print(table(report["cases"], bandwidth))


if __name__ == "__main__":
    main()
