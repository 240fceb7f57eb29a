"""The real scheduler and gate over a device that exists in virtual time only: minutes of serving in a second.

A step takes as long as a cost model says, a load of an adapter too, and whoever arrives meanwhile is taken
in before the next step, as `engine.loop.EngineLoop` does. Nothing here looks at the wall clock, so that every
run is the same. Figures are those of SmolLM2 on two cores.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from builders import FakeStore

from engine.adapter_tiers import NUM_LOAD_THREADS, AdapterTiers
from engine.block_pool import BlockPool
from engine.rank_pages import RankPages
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.sequence import Request
from engine.step import RowResult, StepPlan, StepResult

STEP_S = 0.018
TOKEN_S = 0.00085
LOAD_S = 0.005
COPY_S = 0.0009


def step_seconds(plan: StepPlan) -> float:
    """What a step takes: reading the weights once, and something for each token."""
    return STEP_S + TOKEN_S * sum(len(row.tokens) for row in plan.rows)


@dataclass
class Life:
    """What became of a request, in seconds of virtual time."""

    request: Request
    arrived: float
    first_token: float | None = None
    ended: float | None = None
    num_tokens: int = 0

    @property
    def ttft(self) -> float:
        assert self.first_token is not None, "it never had a token"
        return self.first_token - self.arrived


class _Threads:
    """Stands for the pool that loads adapters: a job ends `LOAD_S` after a thread has begun with it."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._free_at = [0.0] * NUM_LOAD_THREADS

    def submit(self, job: Callable[..., None], *args: object) -> Future[None]:
        future: Future[None] = Future()
        begin = self._engine.now if self._engine.reads_from is None else self._engine.reads_from
        start = max(begin, heapq.heappop(self._free_at))
        heapq.heappush(self._free_at, start + LOAD_S)

        def end() -> None:
            if future.set_running_or_notify_cancel():
                job(*args)
                future.set_result(None)

        self._engine.at(start + LOAD_S, end)
        return future

    def shutdown(self, **_: Any) -> None:
        """There are no threads to end."""


@dataclass
class VirtualEngine:
    """Serves what `send` announces, until `run` has reached a time or the last request's end.

    Attributes:
        lives: by link and request id.
        service: by tenant: (time, what a step added to its unweighted service), as clients see it.
    """

    num_pages: int = 8
    num_blocks: int = 400
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 4096
    enable_prefix_caching: bool = True
    make_scheduler: Callable[..., Scheduler] = Scheduler
    now: float = 0.0
    num_steps: int = 0
    lives: dict[tuple[Any, int], Life] = field(default_factory=dict)
    service: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    after_step: Callable[[StepPlan], None] = lambda plan: None

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._num_served: dict[int, int] = {}
        self.reads_from: float | None = None
        self.store = FakeStore()
        self.tiers = AdapterTiers(self.store.read, num_pages=self.num_pages, host_bytes=1 << 20)
        self.tiers.close()
        self.tiers._pool = _Threads(self)  # type: ignore[assignment]
        pages = RankPages(self.num_pages, in_host=self.tiers.has)
        self.gate = AdapterGate(pages, self.tiers, self._copy, clock=self.clock)
        limits = SchedulerLimits(self.max_num_seqs, self.max_num_batched_tokens, self.max_num_waiting)
        pool = BlockPool(self.num_blocks, enable_prefix_caching=self.enable_prefix_caching)
        self.scheduler = self.make_scheduler(limits, pool, self.gate, clock=self.clock)

    def clock(self) -> float:
        return self.now

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Has something happen at a time; between steps, if one is under way then."""
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def send(self, request: Request, time: float) -> Life:
        """Has a request arrive at a time."""
        life = self.lives[request.key] = Life(request, time)
        request.arrival = time

        def arrive() -> None:
            # The server's thread has begun to read its adapter when it came; the scheduler hears of it now.
            self.reads_from = time
            self.gate.begin_load(request.adapter_digest)
            self.reads_from = None
            self.scheduler.add(request)

        self.at(time, arrive)
        return life

    def run(self, until: float = float("inf")) -> None:
        """Steps until a time, or until nobody is left and nobody will come."""
        while self.now < until:
            self._take_events()
            plan = self.scheduler.schedule()
            if plan.rows:
                self.num_steps += 1
                self.now += step_seconds(plan)
                rows = [row for row in plan.rows if row.sampling is not None]
                result = StepResult(tuple(RowResult(row.seq_id, 1) for row in rows))
                self._note_prompts(plan)
                self.scheduler.note_time(plan, step_seconds(plan))
                self.scheduler.update(plan, result)
            elif self._events:
                self.now = max(self.now, self._events[0][0])
            elif not self.scheduler.num_waiting:
                return
            self._collect()
            self.after_step(plan)

    def _take_events(self) -> None:
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()

    def _copy(self, pages: object, copy: object) -> None:
        self.now += COPY_S

    def _note_prompts(self, plan: StepPlan) -> None:
        """Tokens of prompts that are computed for the first time are service; again is not."""
        for row in plan.rows:
            seq = self.scheduler._roster.get(row.seq_id)
            assert seq is not None
            before = self._num_served.get(row.seq_id, row.start)
            now = min(row.start + len(row.tokens), seq.num_given)
            if now > before:
                self.service[seq.request.tenant].append((self.now, float(now - before)))
            self._num_served[row.seq_id] = max(before, now)

    def _collect(self) -> None:
        for link, out in self.scheduler.take_outputs().items():
            for request_id in out.request_ids:
                life = self.lives[link, request_id]
                life.num_tokens += 1
                life.first_token = life.first_token or self.now
                self.service[life.request.tenant].append((self.now, 2.0))
            for end in out.finished:
                self.lives[link, end.request_id].ended = self.now
