"""What 2,000 registered adapters cost in place of 5, on a GPU: the engine without its gateway.

    python -m benchmarks.gpu_many --out results.json

Random weights of Llama-3.1-8B's shape, and adapters of the kind with which S-LoRA (arXiv 2311.03285, table 3,
setting S1) keeps 94.5 % of its throughput: rank 8 on q, k, v and o, 13.6 MB each. Requests of 512 random
prompt tokens, answered with 64 to 192, are drawn from 5 adapters, from all of them alike, and from all by
Zipf's law. 256 run at once, and some more wait, as at a server that is asked for more than it can do. There
are rank pages for somewhat more adapters than run, and host memory for no more than an engine page-locks at
the start, so most of what is drawn alike is read from disk.

All adapters lie in a folder store, and are read as an engine reads them, which checks no digests: an upload
has. To have them written in seconds, only some have weights of their own, and the others hard links to these;
that spares the system's page cache, and no step of a load.

Throughput is that of the time in which all seats are taken: from when they are, and as many requests as half
the seats have ended, so that those that began together do not count, to when the last one comes. `seats` is
the mean of how many are taken then. What comes first is not counted: short requests, until pages and host
memory are full.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from adapters.folder_store import FolderStore
from benchmarks.gpu_cold_load import RESERVED, write_cold_adapter
from benchmarks.gpu_throughput import MAX_NUM_SEQS, NUM_BLOCKS, Bench
from benchmarks.random_adapters import draw
from engine.adapter_readers import NUM_READERS, Readers, reader_of
from engine.adapter_tiers import AdapterTiers
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.model.adapter_rehearsal import prepare_loads
from engine.outputs import LinkOutput
from engine.rank_pages import RankPages
from engine.scheduler import Scheduler
from engine.scheduler.adapter_gate import AdapterGate
from engine.scheduler.placements import PLACEMENTS_PER_STEP

RANK, PROJECTIONS = 8, ("q_proj", "k_proj", "v_proj", "o_proj")
FEW = 5
NUM_PAGES = MAX_NUM_SEQS + 64
NUM_WRITERS = 14
PROMPT, OUTPUT = 512, 128
OWN_BYTES = 32 << 10
"""At the end of a file; they make it differ from the others."""


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    adapters: int = 2000
    files: int = 500
    """Adapters whose weights are a file of their own."""
    requests: int = 896
    waiting: int = 64
    """Requests that are here beyond those that can run."""
    host_bytes: int = RESERVED


@dataclass
class Adapters:
    """A folder store of adapters, written in threads beside whatever the caller does meanwhile."""

    root: Path
    size: Size
    digests: list[bytes] = field(init=False)
    _pool: ThreadPoolExecutor = field(init=False)
    _done: list[Future[None]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.digests = [hashlib.sha256(b"%d" % number).digest() for number in range(self.size.adapters)]
        self._pool = ThreadPoolExecutor(NUM_WRITERS)

    def begin(self) -> None:
        """Starts to write."""
        template = self.root / "template"
        template.mkdir()
        write_cold_adapter(template, rank=RANK, projections=PROJECTIONS)
        FolderStore(self.root)
        for number in range(self.size.files):
            self._done.append(self._pool.submit(self._write, template, number))

    def store(self) -> FolderStore:
        """The store with all adapters, once they are there."""
        for future in self._done:
            future.result()
        self._pool.shutdown()
        return FolderStore(self.root)

    def _write(self, template: Path, number: int) -> None:
        """An adapter with weights of its own, and all that share its file."""
        first = self._folder(number)
        for folder in map(self._folder, range(number, self.size.adapters, self.size.files)):
            folder.mkdir(parents=True)
            os.link(template / "adapter_config.json", folder / "adapter_config.json")
            weights = folder / "adapter_model.safetensors"
            if folder != first:
                os.link(first / weights.name, weights)
                continue
            with (template / weights.name).open("rb") as source, weights.open("wb") as target:
                length = os.fstat(source.fileno()).st_size
                sent = 0
                while sent < length:
                    sent += os.sendfile(target.fileno(), source.fileno(), sent, length - sent)
                own = torch.randn(OWN_BYTES // 2, generator=torch.Generator().manual_seed(number)) * 0.02
                os.pwrite(
                    target.fileno(), own.bfloat16().view(torch.uint8).numpy().tobytes(), length - OWN_BYTES
                )

    def _folder(self, number: int) -> Path:
        name = self.digests[number].hex()
        return self.root / "sha256" / name[:2] / name


class Tally:
    """What came when: tokens, ends, the last request; and how many seats were taken."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.last_sent = 0.0
        self._began = time.perf_counter()
        self._settled = 0.0
        self._tokens: list[tuple[float, int]] = []
        self._seats: list[tuple[float, int]] = []

    def deliver(self, outputs: Mapping[Hashable, LinkOutput]) -> None:
        """Takes in the news of a step."""
        now = time.perf_counter()
        for news in outputs.values():
            assert not any(finished.error for finished in news.finished), news.finished[:1]
            self._tokens.append((now, len(news.tokens)))
            self.num_ended += len(news.finished)
            if self.num_ended >= MAX_NUM_SEQS // 2 and not self._settled:
                self._settled = now

    def note_seats(self, count: int) -> None:
        """A step has been planned, of so many running sequences."""
        self._seats.append((time.perf_counter(), count))

    def figures(self) -> dict[str, float]:
        """Tokens a second, over the whole and while all seats were taken, and what that time was like."""
        full = next((at for at, count in self._seats if count >= MAX_NUM_SEQS), 0.0)
        begin, end = max(self._settled, full), self.last_sent
        if not self._settled or end <= begin:
            return {}
        tokens = sum(count for at, count in self._tokens if begin < at <= end)
        seats = [count for at, count in self._seats if begin < at <= end]
        whole = self._tokens[-1][0] - self._began
        return {
            "sustained": tokens / (end - begin),
            "whole": sum(count for _, count in self._tokens) / whole,
            "seconds": whole,
            "sustained_seconds": end - begin,
            "steps": len(seats),
            "step_ms": 1e3 * (end - begin) / len(seats),
            "seats": statistics.mean(seats),
        }


class Engine:
    """The scheduler, the tiers and the loop over a bench's runner, for all cases together."""

    def __init__(self, bench: Bench, adapters: Adapters) -> None:
        self._bench, self._size, self._digests = bench, adapters.size, adapters.digests
        self._news = threading.Event()
        self._tiers = AdapterTiers(
            reader_of(bench.model.network),
            fetch=adapters.store().reading,
            place=Readers(NUM_READERS).place,
            num_pages=NUM_PAGES,
            host_bytes=self._size.host_bytes,
            wake=self._news.set,
        )
        gate = AdapterGate(
            RankPages(NUM_PAGES, in_host=self._tiers.has),
            self._tiers,
            bench.runner.write_adapter,
            bench.runner.drop_adapter,
            placements_per_step=PLACEMENTS_PER_STEP["cuda"],
        )
        pool = BlockPool(NUM_BLOCKS, enable_prefix_caching=False)
        self._scheduler = Scheduler(bench.limits, pool, gate)
        self._loop = EngineLoop(self._scheduler, bench.runner, gate, self._news, overlap=True)

    def fill(self) -> None:
        """Has short answers made with adapters one after the other, until all memory for them is full."""
        count = min(self._size.adapters, NUM_PAGES + 64)
        self._serve(list(range(count)), [2] * count, 16, deadline=float("inf"))

    def run(self, adapters: int, *, zipf: bool, seed: int, deadline: float) -> dict[str, Any]:
        """One case's figures. It is cut short at the deadline, on the monotonic clock."""
        rng = random.Random(0)  # lengths as in all cases
        lengths = [rng.randint(OUTPUT // 2, OUTPUT * 3 // 2) for _ in range(self._size.requests)]
        before = self._tiers.counters.snapshot().sums()
        tally = self._serve(
            draw(adapters, self._size.requests, zipf=zipf, seed=seed), lengths, PROMPT, deadline=deadline
        )
        after = self._tiers.counters.snapshot().sums()
        counted = {name: round(after[name] - before[name], 3) for name in after}
        cut = tally.num_ended < self._size.requests
        return {**tally.figures(), "is_cut_short": cut, "adapters": counted}

    def close(self) -> None:
        """Ends the loads."""
        self._tiers.close()

    def _serve(
        self, adapters: Sequence[int], lengths: Sequence[int], prompt: int, *, deadline: float
    ) -> Tally:
        """A request for each adapter, by its number: as many at once as run, and some that wait."""
        requests = [
            self._bench.request(number, prompt, length, self._digests[adapter])
            for number, (adapter, length) in enumerate(zip(adapters, lengths, strict=True))
        ]
        tally, num_sent = Tally(), 0
        while tally.num_ended < len(requests) and time.monotonic() < deadline:
            for request in requests[num_sent : tally.num_ended + MAX_NUM_SEQS + self._size.waiting]:
                self._scheduler.add(request)
                num_sent += 1
                tally.last_sent = time.perf_counter()
            if not self._loop.step(tally.deliver):
                self._news.wait(0.001)
                self._news.clear()
            tally.note_seats(self._scheduler.num_running)
        self._scheduler.abort_link("bench")
        while self._loop.step(lambda outputs: None):
            pass
        return tally


def measure(size: Size, began: float, budget_seconds: float, root: Path) -> dict[str, Any]:
    """All that there is time for, as a JSON document."""
    adapters = Adapters(root, size)
    adapters.begin()
    bench = Bench(8192, num_rank_pages=NUM_PAGES)
    reserved = min(RESERVED, size.host_bytes)
    prepare_loads(bench.model.network, bench.runner.write_adapter, host_bytes=reserved, max_rank=64)
    gc.collect()
    gc.freeze()  # as an engine does before it serves
    show("model", began)
    engine = Engine(bench, adapters)
    show("adapters", began)
    engine.fill()
    show("filled", began)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "size": {**vars(size), "pages": NUM_PAGES, "rank": RANK, "projections": PROJECTIONS},
        "ready_seconds": {**bench.seconds, "all": time.monotonic() - began},
        "cases": {},
    }
    cases = (
        (f"{FEW}", FEW, False),
        (f"{size.adapters} uniform", size.adapters, False),
        (f"{size.adapters} Zipf", size.adapters, True),
        (f"{FEW} again", FEW, False),
    )
    for number, (name, count, zipf) in enumerate(cases):
        now = time.monotonic()
        share = (began + budget_seconds - now) / (len(cases) - number)
        if share > 0:
            report["cases"][name] = engine.run(count, zipf=zipf, seed=number, deadline=now + share)
            show(f"{name}: {json.dumps(report['cases'][name])}", began)
    engine.close()
    return report


def show(what: str, began: float) -> None:
    """Says what has come about, and when."""
    print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Each case's figures; ratios are to the first."""
    columns = ("sustained", "whole", "seats", "step_ms")
    counts = ("requests_device", "requests_host", "requests_cold", "loads_disk", "copies")
    heading = " ".join(f"{column.removeprefix('requests_'):>10}" for column in (*columns, *counts))
    lines = [f"{'adapters':>14} {'ratio':>7} {heading}"]
    first = next(iter(cases.values()), {}).get("sustained")
    for name, case in cases.items():
        ratio = f"{case['sustained'] / first:.3f}" if first and "sustained" in case else "-"
        cells = [f"{case[column]:.1f}" if column in case else "-" for column in columns]
        cells += [f"{case['adapters'][count]:.0f}" for count in counts]
        cut = " (cut short)" if case["is_cut_short"] else ""
        lines.append(f"{name:>14} {ratio:>7} " + " ".join(f"{cell:>10}" for cell in cells) + cut)
    return "\n".join(lines)


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_many.json"))
    parser.add_argument("--budget-seconds", type=float, default=100.0, help="end then, whatever lacks")
    parser.add_argument("--adapters", type=int, default=Size.adapters, help="registered")
    parser.add_argument("--files", type=int, default=Size.files, help="of these with weights of their own")
    parser.add_argument("--requests", type=int, default=Size.requests, help="in each case")
    parser.add_argument("--waiting", type=int, default=Size.waiting, help="requests beyond those that run")
    parser.add_argument("--host-gib", type=float, default=Size.host_bytes / 2**30, help="for copies")
    parser.add_argument("--folder", type=Path, help="where the adapters go, if not among temporary files")
    options = parser.parse_args()
    size = Size(
        options.adapters,
        min(options.files, options.adapters),
        options.requests,
        options.waiting,
        int(options.host_gib * 2**30),
    )
    with tempfile.TemporaryDirectory(prefix="loraplex-many-", dir=options.folder) as root:
        report = measure(size, began, options.budget_seconds, Path(root))
    options.out.write_text(json.dumps(report, indent=1))
    print("output tokens a second while all seats are taken, to the first case, and over the whole; loads")
    print(table(report["cases"]))


if __name__ == "__main__":
    main()
