"""What the scheduler makes of a GPU: the real one, over steps that take as long as was measured on an H200.

    python -m benchmarks.virtual_gpu

Time is virtual: a step lasts what `results/h200-*.json` have for its decodes and prompt tokens, between the
measured sizes in proportion; adapters come in no time. So rules of scheduling can be compared without a GPU,
in seconds: 64 adapters in room for 8 gave 3,609 tokens/s on the device and give 3,686 here, with room for all
6,367 and 6,537.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu_throughput import SPREAD_PROMPTS
from engine.adapter_tiers import AdapterTiers
from engine.block_pool import BlockPool
from engine.model.adapter_weights import HostAdapter
from engine.rank_pages import RankPages
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.sequence import Request
from engine.step import RowResult, SamplingParams, StepPlan, StepResult

RESULTS = Path(__file__).parent / "results"
NUM_BLOCKS, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16384, 256, 8192
HOST_MS = 0.15
"""Logits, the draw and the gap between two steps, beside the graph."""
Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Case:
    """``pages``: room for so many adapters, of which each has ``per`` requests, in all ``requests``.

    ``prompt`` and ``output``: the least and the most tokens. ``rate``: requests a second; 0: all at once.
    ``tenants``: who send them in turn.
    """

    requests: int
    per: int
    pages: int
    prompt: tuple[int, int] = (64, 960)
    output: tuple[int, int] = (32, 224)
    rate: float = 0.0
    tenants: int = 1


CASES = {
    "64 in 8, 512 + 128": Case(256, 4, 8, (512, 512), (128, 128)),
    "64 in 64, 512 + 128": Case(256, 4, 64, (512, 512), (128, 128)),
    "room for 4": Case(400, 4, 4),
    "room for 8": Case(480, 4, 8),
    "room for 16": Case(480, 4, 16),
    "room for 32": Case(480, 4, 32),
    "room for 64": Case(640, 4, 64),
    "room for 8, short prompts": Case(480, 4, 8, (16, 128)),
    "room for 8, long prompts": Case(200, 4, 8, (500, 4000)),
    "room for 64, 10 a second": Case(400, 4, 64, rate=10),
    "room for 64, 25 a second": Case(800, 4, 64, rate=25),
    "room for 64, 10 a second, long prompts": Case(400, 4, 64, (500, 4000), rate=10),
    "64 in 64, 512 + 128, 4 tenants": Case(256, 4, 64, (512, 512), (128, 128), tenants=4),
    "room for 8, 4 tenants": Case(480, 4, 8, tenants=4),
    "room for 32, 4 tenants": Case(480, 4, 32, tenants=4),
    "room for 64, 4 tenants": Case(640, 4, 64, tenants=4),
    "room for 64, 10 a second, long prompts, 4 tenants": Case(400, 4, 64, (500, 4000), rate=10, tenants=4),
}


def at(line: Line, x: float) -> float:
    """The value of a line through points."""
    return float(np.interp(x, [x for x, _ in line], [y for _, y in line]))


class StepTimes:
    """Milliseconds of a step, by how many sequences decode in it and how many prompt tokens it has."""

    def __init__(self) -> None:
        mixed = json.loads((RESULTS / "h200-steps.json").read_text())["mixed"]
        whole = json.loads((RESULTS / "h200-throughput.json").read_text())["cases"]["8"]
        decodes = json.loads((RESULTS / "h200-decode.json").read_text())["steps"]
        graphs = {step["rows"]: step["graph"] for step in decodes if step["adapters"] in (1, 8)}
        self._decodes = [(0.0, graphs[1]), *sorted(graphs.items())]
        prefill = MAX_NUM_BATCHED_TOKENS / whole["prefill"] * 1e3
        self._beside: dict[int, Line] = {}
        for count in (0, 28, 128):
            points = {0: at(self._decodes, count) if count else 0.0}
            for name, ms in mixed.items():
                tokens, others = (int(part.split()[0]) for part in name.split(", "))
                if others == count:
                    points[tokens - count] = ms
            points[MAX_NUM_BATCHED_TOKENS - count] = prefill
            self._beside[count] = sorted(points.items())

    def __call__(self, plan: StepPlan) -> float:
        decodes = sum(len(row.tokens) == 1 for row in plan.rows)
        tokens = sum(len(row.tokens) for row in plan.rows) - decodes
        if not tokens:
            return at(self._decodes, decodes) + HOST_MS
        beside = [(count, at(line, tokens)) for count, line in self._beside.items()]
        more = at(self._decodes, max(decodes, 128)) - at(self._decodes, 128)
        return at(beside, decodes) + more + HOST_MS


def arrivals(case: Case, rng: random.Random) -> Iterator[tuple[float, Request]]:
    """Requests and when they come, in milliseconds."""
    now, adapters = 0.0, case.requests // case.per
    for number in range(case.requests):
        if case.rate:
            now += rng.expovariate(case.rate) * 1e3
        prompt = rng.randint(*case.prompt)
        yield (
            now,
            Request(
                link="bench",
                request_id=number,
                prompt=[rng.randrange(100_000) for _ in range(prompt)],
                sampling=(SamplingParams(),),
                max_len=prompt + rng.randint(*case.output),
                block_root=bytes(32),
                adapter_digest=b"%d" % (number % adapters),
                tenant=f"tenant-{number % case.tenants}",
                arrival=now,
            ),
        )


def serve(case: Case, step_ms: StepTimes, seed: int) -> dict[str, float]:
    """Tokens a second; the 99th percentile of gaps between a sequence's tokens; first tokens' median."""
    news = threading.Event()
    adapter = HostAdapter(rank=16, num_pages=1, nbytes=1, groups={})
    tiers = AdapterTiers(lambda digest: adapter, num_pages=case.pages, host_bytes=1 << 40, wake=news.set)
    gate = AdapterGate(RankPages(case.pages), tiers, lambda pages, adapter: lambda: True, lambda pages: None)
    limits = SchedulerLimits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, spread_prompts=SPREAD_PROMPTS)
    scheduler = Scheduler(limits, BlockPool(NUM_BLOCKS, enable_prefix_caching=False), gate)
    coming = list(arrivals(case, random.Random(seed)))[::-1]
    came: dict[Any, float] = {request.request_id: when for when, request in coming}
    firsts: dict[Any, float] = {}
    gaps: list[tuple[float, int]] = []
    now, num_tokens, num_ended = 0.0, 0, 0
    while num_ended < case.requests:
        while coming and coming[-1][0] <= now:
            scheduler.add(coming.pop()[1])
        plan = scheduler.schedule()
        if scheduler.is_loading:  # which takes no virtual time
            news.wait(0.002)
            news.clear()
        if not plan.rows:
            if coming and not scheduler.is_loading:
                now = max(now, coming[-1][0])
            continue
        took = step_ms(plan)
        now += took
        scheduler.note_time(plan, took / 1e3)
        gaps.append((took, sum(len(row.tokens) == 1 for row in plan.rows)))
        drawn = tuple(RowResult(row.seq_id, 7) for row in plan.rows if row.sampling is not None)
        num_tokens += len(drawn)
        scheduler.update(plan, StepResult(drawn))
        for link in scheduler.take_outputs().values():
            num_ended += len(link.finished)
            for number in link.request_ids:
                firsts.setdefault(number, now)
    tiers.close()
    ttfts = sorted(firsts[number] - came[number] for number in came)
    return {
        "tokens_s": num_tokens / now * 1e3,
        "gap_p99_ms": weighted_p99(gaps),
        "ttft_p50_ms": median(ttfts),
        "ttft_p99_ms": ttfts[int(0.99 * len(ttfts))],
    }


def weighted_p99(gaps: Sequence[tuple[float, int]]) -> float:
    """The gap that 99 of 100 tokens waited no longer for."""
    left = 0.01 * sum(count for _, count in gaps)
    for gap, count in sorted(gaps, reverse=True):
        left -= count
        if left <= 0:
            return gap
    return 0.0


def table(report: Mapping[str, Mapping[str, float]]) -> str:
    names = list(next(iter(report.values())))
    lines = [f"{'':50}" + "".join(f"{name:>14}" for name in names)]
    lines += [
        f"{case:50}" + "".join(f"{figures[name]:14.1f}" for name in names) for case, figures in report.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    times = StepTimes()
    report = {name: serve(case, times, options.seed) for name, case in CASES.items()}
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
