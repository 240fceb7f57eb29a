"""Builds schedulers and requests without a model, and a runner that checks what it is handed.

`FakeRunner` stands for the real one: it keeps, for every slot of the KV pool, a digest of all that the
keys and values there would depend on, and refuses a row whose table does not lead to exactly its own
prefix. So a test that runs against it checks sharing, copying, preemption and adapters all at once.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.adapter_tiers import AdapterTiers
from engine.beams import Beam, BeamOptions, BeamSearch
from engine.block_pool import BLOCK_SIZE, BlockPool, root_hash
from engine.host_copy import HostCopy
from engine.rank_pages import RankPages, pages_for_rank
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.scheduler.background import account_name
from engine.sequence import Request
from engine.step import UNSEEN, RowResult, SamplingParams, StepPlan, StepResult, StepRow, TokenLogprobs

VOCAB_SIZE = 1000
NUM_LIKELY = 48
"""Tokens that searches come upon."""
MODEL_DIGEST = b"m" * 32


def digest_of(name: str) -> bytes:
    """The digest of an adapter that a test calls ``name``."""
    return hashlib.sha256(name.encode()).digest()


@dataclass(frozen=True)
class FakeAdapter:
    """A host copy without weights; ``poison`` makes every row that uses it come out as not finite."""

    digest: bytes
    rank: int = 8
    nbytes: int = 100
    poison: bool = False
    has_vectors: bool = False
    ends_bytes: int = 0
    vocab_size: int = 0

    @property
    def num_pages(self) -> int:
        """As many as its ranks need, and two more rows of one if it has vectors."""
        return pages_for_rank(self.rank + 2 * self.has_vectors)


def make_request(
    prompt: int | Sequence[int] = 20,
    *,
    link: Hashable = "link",
    request_id: int = 1,
    max_tokens: int = 8,
    adapter: str = "",
    adapter_start: int = 0,
    vocab_size: int = 0,
    scope: str = "scope",
    n: int = 1,
    output: Sequence[int] = (),
    stop: Iterable[int] = (),
    tenant: str = "tenant",
    background: bool = False,
    weight: float = 1.0,
    priority: int = 0,
    min_tokens: int = 0,
    arrival: float | None = None,
    deadline: float | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    prompt_only: bool = False,
    max_model_len: int = 1 << 30,
    search: dict[str, Any] | None = None,
) -> Request:
    """A request; ``prompt`` is its tokens, or their number. ``search``: options of one with ``n`` beams."""
    tokens = [i % VOCAB_SIZE for i in range(7, 7 + prompt)] if isinstance(prompt, int) else list(prompt)
    digest = digest_of(adapter) if adapter else b""
    max_len = min(len(tokens) + max_tokens, max_model_len)
    beams = None
    if search is not None:
        beams = BeamOptions(n, max_len - len(tokens), frozenset(stop), num_top=logprobs, **search)
        logprobs = beams.num_candidates
    return Request(
        link=link,
        request_id=request_id,
        prompt=tokens,
        output=list(output),
        sampling=tuple(SamplingParams(seed=seed, logprobs=logprobs) for seed in range(n)),
        max_len=max_len,
        block_root=root_hash(MODEL_DIGEST, "float32", b"" if adapter_start else digest, scope.encode()),
        adapter_digest=digest,
        adapter_start=adapter_start,
        vocab_size=vocab_size,
        tenant=account_name(tenant, background=background),
        weight=weight,
        priority=priority,
        min_tokens=min_tokens,
        stop_token_ids=frozenset(stop),
        arrival=time.monotonic() if arrival is None else arrival,
        deadline=deadline,
        prompt_logprobs=prompt_logprobs,
        prompt_only=prompt_only,
        beams=beams,
    )


class FakeStore:
    """Adapters by digest. `AdapterTiers` reads them in its threads; ``hold`` keeps them waiting."""

    def __init__(self) -> None:
        self.adapters: dict[bytes, FakeAdapter] = {}
        self.reads: list[bytes] = []
        self.local: set[bytes] = set()
        """What the local disk has of it."""

    def add(self, name: str, rank: int = 8, *, nbytes: int = 100, **more: Any) -> bytes:
        digest = digest_of(name)
        self.adapters[digest] = FakeAdapter(digest, rank, nbytes, **more)
        return digest

    def is_local(self, digest: bytes) -> bool:
        return digest in self.local

    def discard(self, digest: bytes) -> None:
        self.local.discard(digest)

    def read(self, digest: bytes) -> FakeAdapter:
        self.reads.append(digest)
        if digest not in self.adapters:
            raise LookupError("the store has no such adapter")
        self.local.add(digest)
        return self.adapters[digest]


class PendingResult:
    """The result of a step that a `FakeRunner` may not have run yet."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._result: StepResult | None = None

    def fill(self, result: StepResult) -> None:
        self._result = result

    def draw(self) -> None:
        """A fake device draws by itself."""

    def result(self) -> StepResult:
        """Lets the device run until it has this step."""
        while self._result is None:
            self._runner.queue.popleft()()
        return self._result


@dataclass
class FakeRunner:
    """Runs plans on digests instead of tensors, and asserts that each row reads what is its own."""

    num_blocks: int
    num_pages: int
    max_num_seqs: int = 1 << 30
    max_num_batched_tokens: int = 1 << 30
    step_s: float = 0.0
    """Time that a step takes, as a device would: without the interpreter's lock."""
    before: Callable[[StepPlan], None] = lambda plan: None
    landing_steps: int = 0
    """Steps that go by until a copy to the pages is said to have landed."""
    num_writes: int = 0
    num_steps: int = 0
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    """What the device has yet to do, in order; it does it as late as it can."""
    drawn: dict[int, int] = field(default_factory=dict)
    """By sequence: the tokens of the step that ran last."""
    slots: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """By slot: what the context was before its token, and what it is with it."""
    pages: dict[int, FakeAdapter] = field(default_factory=dict)
    planned: list[tuple[Sequence[int], list[int]]] = field(default_factory=list)
    """The block tables of the step before, and what they were then."""
    ends: dict[int, int] = field(default_factory=dict)
    """By the first page of an adapter that has some: bytes outside the pages."""

    def write_adapter(self, pages: Sequence[int], adapter: HostCopy) -> Callable[[], bool]:
        assert isinstance(adapter, FakeAdapter)
        assert all(0 <= page < self.num_pages for page in pages)
        assert len(pages) == adapter.num_pages
        self.queue.append(lambda: self._write(pages, adapter))
        self.num_writes += 1
        landing = self.num_steps + self.landing_steps
        return lambda: self.num_steps >= landing

    def _write(self, pages: Sequence[int], adapter: FakeAdapter) -> None:
        self.pages.update(dict.fromkeys(pages, adapter))
        if adapter.ends_bytes:
            assert pages[0] not in self.ends, "what another adapter had there was not dropped"
            self.ends[pages[0]] = adapter.ends_bytes

    def flush(self) -> None:
        """Lets the device do all that it has yet to do."""
        while self.queue:
            self.queue.popleft()()

    def drop_adapter(self, pages: Sequence[int]) -> None:
        self.queue.append(lambda: self._drop(pages))

    def _drop(self, pages: Sequence[int]) -> None:
        del self.ends[pages[0]]

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    def submit(self, plan: StepPlan) -> PendingResult:
        """Queues a plan as it is now: block tables grow afterwards."""
        self.num_steps += 1
        self.before(plan)
        for table, before in self.planned:
            assert list(table[: len(before)]) == before, "a table that was planned with may only grow"
        self.planned = [(row.block_ids, list(row.block_ids)) for row in plan.rows]
        rows = tuple(replace(row, block_ids=tuple(row.block_ids)) for row in plan.rows)
        pending = PendingResult(self)
        self.queue.append(lambda: pending.fill(self._compute(replace(plan, rows=rows))))
        return pending

    def _compute(self, plan: StepPlan) -> StepResult:
        assert len(plan.rows) <= self.max_num_seqs
        assert sum(len(row.tokens) for row in plan.rows) <= self.max_num_batched_tokens
        assert len({row.seq_id for row in plan.rows}) == len(plan.rows), "a sequence has two rows"
        for source, target in plan.block_copies:
            for offset in range(BLOCK_SIZE):
                content = self.slots.get(source * BLOCK_SIZE + offset)
                if content is not None:
                    self.slots[target * BLOCK_SIZE + offset] = content
        written: dict[int, int] = {}
        results: list[RowResult] = []
        for row in plan.rows:
            if row.tokens[0] == UNSEEN:
                row = replace(row, tokens=(self.drawn[row.seq_id],))
            state = self._run(row, written)
            if row.sampling is not None:
                results.append(self._draw(row, state))
        self.drawn = {result.seq_id: result.token for result in results}
        scored = {
            row.seq_id: tuple(TokenLogprobs(float(token)) for token in self._scored(row))
            for row in plan.rows
            if row.scoring is not None
        }
        if self.step_s:
            time.sleep(self.step_s)
        return StepResult(tuple(results), prompt_logprobs=scored)

    def _scored(self, row: StepRow) -> Sequence[int]:
        """The tokens that a row scores: each comes after one that the row computes."""
        assert row.scoring is not None
        first, tokens = row.scoring.first, list(row.scoring.tokens)
        assert first >= 0 and tokens and first + len(tokens) <= len(row.tokens)
        own = list(row.tokens[first + 1 :])
        assert tokens[: len(own)] == own[: len(tokens)]
        return tokens

    def _run(self, row: StepRow, written: dict[int, int]) -> bytes:
        """Extends the chain of the row's tokens; what a slot holds stands for all that went before it."""
        adapter = self._adapter(row)
        start = row.adapter_start if adapter else None
        state = b""
        spare = len(row.block_ids) * BLOCK_SIZE - row.start - len(row.tokens)
        assert spare >= 0, "the table is too short"
        assert spare < BLOCK_SIZE or row.sampling is None, "the table has a block for nothing"
        for position in range(row.start):
            if adapter and position == start:
                state = activate(state, adapter.digest)
            before, after = self.slots[self._slot(row, position)]
            assert before == state, "the table leads to another context's keys and values"
            state = after
        for position, token in enumerate(row.tokens, row.start):
            slot = self._slot(row, position)
            block = slot // BLOCK_SIZE
            assert written.setdefault(block, row.seq_id) == row.seq_id, "two rows write to one block"
            if adapter and position == start:
                state = activate(state, adapter.digest)
            before, state = state, link_state(state, token)
            self.slots[slot] = (before, state)
        return state

    def _draw(self, row: StepRow, state: bytes) -> RowResult:
        adapter = self._adapter(row)
        if adapter is not None and adapter.poison:
            return RowResult(row.seq_id, 0, error="the logits are not finite")
        assert row.sampling is not None
        token = draw(state, row.sampling.seed, row.banned_tokens)
        count = row.sampling.logprobs
        return RowResult(row.seq_id, token, None if count is None else top_after(state, count))

    def _adapter(self, row: StepRow) -> FakeAdapter | None:
        if row.adapter is None:
            return None
        found = {self.pages[page] for page in row.adapter.pages}
        assert len(found) == 1, "the pages of one adapter hold another's weights"
        adapter = found.pop()
        assert adapter.rank == row.adapter.rank and adapter.has_vectors == row.adapter.has_vectors
        assert (row.adapter.pages[0] in self.ends) == (adapter.ends_bytes > 0) == row.adapter.has_ends
        return adapter

    def _slot(self, row: StepRow, position: int) -> int:
        block = row.block_ids[position // BLOCK_SIZE]
        assert 0 <= block < self.num_blocks
        return block * BLOCK_SIZE + position % BLOCK_SIZE


def activate(state: bytes, adapter_digest: bytes) -> bytes:
    """The context from which on an adapter applies."""
    return hashlib.blake2b(state + b"activate" + adapter_digest, digest_size=16).digest()


def link_state(state: bytes, token: int) -> bytes:
    return hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=16).digest()


def draw(state: bytes, seed: int, banned: Sequence[int] = ()) -> int:
    """The token that a fake model draws: a function of all tokens before, the adapter, and the seed."""
    for attempt in range(100):
        noise = hashlib.blake2b(state + bytes([seed % 256, attempt]), digest_size=4).digest()
        token = int.from_bytes(noise, "little") % VOCAB_SIZE
        if token not in banned:
            return token
    raise AssertionError("everything is banned")


def top_after(state: bytes, count: int) -> TokenLogprobs:
    """The likeliest tokens of a fake model: of few, so that searches meet their end tokens."""
    noise = hashlib.blake2b(state + b"top", digest_size=64).digest()
    order = sorted(range(NUM_LIKELY), key=lambda token: noise[token])[:count]
    logprobs = [-(1 + noise[token]) / 64 - token / 1024 for token in order]
    found = sorted(zip(logprobs, order, strict=True), reverse=True)
    return TokenLogprobs(0.0, tuple(token for _, token in found), tuple(logprob for logprob, _ in found))


def expected_answers(request: Request) -> list[list[int]]:
    """What a search over the fake model finds if it is alone, and nothing is shared."""
    assert request.beams is not None
    search = BeamSearch(request.beams)
    while search.beams:
        search.advance({beam: _top_of(request, beam) for beam in search.beams})
    return [answer.tokens for answer in search.answers]


def _top_of(request: Request, beam: Beam) -> TokenLogprobs:
    assert request.beams is not None
    return top_after(context_of(request, beam.tokens), request.beams.num_candidates)


def context_of(request: Request, output: Sequence[int]) -> bytes:
    """What the fake model has computed after a request's prompt and some output."""
    state = b""
    for position, token in enumerate((*request.prompt, *output)):
        if request.adapter_digest and position == request.adapter_start:
            state = activate(state, request.adapter_digest)
        state = link_state(state, token)
    return state


def expected_output(request: Request, choice: int = 0) -> list[int]:
    """What the fake model answers if nothing ever goes wrong."""
    state = context_of(request, request.output)
    tokens = list(request.output)
    while len(request.prompt) + len(tokens) < request.max_len:
        banned = request.banned_before_min if len(tokens) < request.min_tokens else ()
        token = draw(state, request.sampling[choice].seed, banned)
        tokens.append(token)
        if token in request.stop_token_ids:
            break
        state = link_state(state, token)
    return tokens[len(request.output) :]


@dataclass
class Engine:
    """A scheduler with everything that it needs, stepped by hand."""

    scheduler: Scheduler
    runner: FakeRunner
    store: FakeStore
    tiers: AdapterTiers
    pages: RankPages
    pool: BlockPool
    gate: AdapterGate
    depth: int = 0
    """Steps under way while the next is planned, as in `engine.loop.EngineLoop`."""
    under_way: deque[tuple[StepPlan, PendingResult]] = field(default_factory=deque)
    tokens: dict[tuple[Hashable, int, int], list[int]] = field(default_factory=dict)
    finished: dict[tuple[Hashable, int, int], tuple[str, str]] = field(default_factory=dict)
    started: dict[tuple[Hashable, int], int] = field(default_factory=dict)
    told: dict[tuple[Hashable, int], list[int]] = field(default_factory=dict)
    """By request: the tokens of its prompt whose logprobs have been told."""
    searched: dict[tuple[Hashable, int], int] = field(default_factory=dict)
    """By request: what its search has cost."""

    def step(self) -> StepPlan:
        """One turn of the loop, with every invariant checked after it."""
        plan = self.scheduler.schedule()
        if plan.rows:
            self.under_way.append((plan, self.runner.submit(plan)))
        if len(self.under_way) > self.depth or not plan.rows:
            self.take_in()
        self.collect()
        self.scheduler.check()
        self.check_hashes()
        return plan

    def check_hashes(self) -> None:
        """Asserts that beams, which exchange tables, have the hashes of their own tokens."""
        for seq in self.scheduler._running:
            if seq.search is not None:
                hashes = replace(seq.request, output=seq.tokens[seq.num_prompt :]).prompt_hashes
                assert seq.block_hashes == hashes[: len(seq.block_hashes)], "another beam's hashes"

    def take_in(self) -> None:
        """Tells the scheduler of the oldest step under way, if there is one."""
        if self.under_way:
            plan, pending = self.under_way.popleft()
            self.scheduler.update(plan, pending.result())

    def collect(self) -> None:
        for link, out in self.scheduler.take_outputs().items():
            for prompt in out.prompts:
                told = self.told.setdefault((link, prompt.request_id), [])
                assert prompt.start == 1 + len(told), "not in order, or told twice"
                told += [int(entry.chosen) for entry in prompt.tokens]
            for request_id, choice, token in zip(out.request_ids, out.choices, out.tokens, strict=True):
                assert (link, request_id, choice) not in self.finished, "a token after the end"
                self.tokens.setdefault((link, request_id, choice), []).append(token)
            for searched in out.searched:
                key = (link, searched.request_id)
                self.searched[key] = self.searched.get(key, 0) + searched.tokens
            for start in out.started:
                assert (link, start.request_id) not in self.started
                self.started[link, start.request_id] = start.cached_tokens
            for end in out.finished:
                assert (link, end.request_id, end.choice) not in self.finished, "ended twice"
                self.finished[link, end.request_id, end.choice] = (end.reason.name, end.error)

    def run(self, max_steps: int = 10_000) -> int:
        """Steps until nobody is left; returns the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.num_running + self.scheduler.num_waiting:
                while self.under_way:
                    self.take_in()
                return count
            if not self.step().rows:
                self.wait_for_loads()
        raise AssertionError("no end in sight")

    def wait_for_loads(self) -> None:
        """Lets the loads' threads run."""
        time.sleep(0.001)

    def check_all_free(self) -> None:
        self.scheduler.check()
        assert self.pool.num_idle == self.pool.num_blocks
        assert self.pages.num_available == self.pages.num_pages

    def close(self) -> None:
        self.tiers.close()


def make_engine(
    *,
    num_blocks: int = 64,
    num_pages: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_num_waiting: int = 1000,
    host_bytes: int = 1 << 20,
    ends_bytes: int = 0,
    enable_prefix_caching: bool = True,
    clock: Callable[[], float] = time.monotonic,
    wake: Callable[[], None] = lambda: None,
    depth: int = 0,
    placements_per_step: int = 1,
) -> Engine:
    """A scheduler over a fake runner and a fake store; small, so that everything runs short."""
    store = FakeStore()
    runner = FakeRunner(num_blocks, num_pages, max_num_seqs, max_num_batched_tokens)
    pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching)
    tiers = AdapterTiers(
        store.read,
        is_local=store.is_local,
        discard=store.discard,
        num_pages=num_pages,
        ends_bytes=ends_bytes,
        host_bytes=host_bytes,
        wake=wake,
    )
    pages = RankPages(num_pages, ends_bytes=ends_bytes, in_host=tiers.has)
    gate = AdapterGate(
        pages,
        tiers,
        runner.write_adapter,
        runner.drop_adapter,
        placements_per_step=placements_per_step,
        clock=clock,
    )
    limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_num_waiting)
    scheduler = Scheduler(limits, pool, gate, clock=clock)
    return Engine(scheduler, runner, store, tiers, pages, pool, gate, depth)


def step_until(engine: Engine, number: int, most: int = 2000) -> int:
    """Steps until a request has started; returns how many steps that took."""
    for steps in range(1, most):
        if not engine.step().rows:
            engine.wait_for_loads()
        if ("link", number) in engine.started:
            return steps
    raise AssertionError("it never started")


def hold_reads(engine: Engine) -> threading.Event:
    """Makes loads take until the event is set."""
    released = threading.Event()
    read = engine.store.read

    def slow_read(digest: bytes) -> FakeAdapter:
        assert released.wait(60)
        return read(digest)

    engine.tiers._read = slow_read
    return released
