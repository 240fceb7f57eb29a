"""Random lives of random requests: nothing is lost, leaked, or owned twice, and every answer is right."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from builders import (
    VOCAB_SIZE,
    Engine,
    digest_of,
    expected_answers,
    expected_output,
    make_engine,
    make_request,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.beams import EarlyStopping
from engine.scheduler import turns
from engine.scheduler.turns import LEAST_TURN
from engine.sequence import Request

ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"rank": 8},
    "same": {"rank": 16},
    "medium": {"rank": 20},
    "large": {"rank": 48},
    "vectors": {"rank": 15, "has_vectors": True},
    "ends": {"rank": 8, "ends_bytes": 60},
    "other-ends": {"rank": 8, "ends_bytes": 50, "has_vectors": True},
    "poison": {"rank": 8, "poison": True},
    "too-large": {"rank": 200},
    "missing": {},
}
ENDS_BYTES = 100
LINKS = ("gateway-1", "gateway-2")


class ManualThreads:
    """Stands for the pool of load threads: a load runs when the test says so."""

    def __init__(self) -> None:
        self._submitted: list[tuple[Future[None], Callable[[], None]]] = []

    @property
    def waiting(self) -> list[Callable[[], None]]:
        """What has been submitted and not cancelled."""
        self._submitted = [item for item in self._submitted if not item[0].cancelled()]
        return [function for _, function in self._submitted]

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        self._submitted.append((future, lambda: function(*args)))
        return future

    def run(self, index: int = 0) -> None:
        function = self.waiting[index]
        future, _ = self._submitted.pop(index)
        future.set_running_or_notify_cancel()
        function()

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        self._submitted.clear()


WISHES = st.fixed_dictionaries(
    {
        "base": st.integers(0, 1),
        "length": st.integers(1, 60),
        "adapter": st.sampled_from(["", "", "", *ADAPTERS]),
        "start": st.sampled_from([0, 0, 1, 15, 16, 17, 32, 40, 59]),
        "n": st.sampled_from([1, 1, 2, 3]),
        "tenant": st.integers(0, 2),
        "link": st.sampled_from(LINKS),
        "max_tokens": st.integers(1, 60),
        "priority": st.integers(-1, 1),
        "patience": st.sampled_from([None, None, None, 50.0]),
        "stop": st.sampled_from([False, False, True]),
        "known": st.sampled_from([0, 0, 5, 20]),
        "scored": st.sampled_from([None, None, 1]),
        "only": st.sampled_from([False, False, False, True]),
        "search": st.sampled_from([None, None, *EarlyStopping]),
        "background": st.sampled_from([False, False, True]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    engine: Engine
    threads: ManualThreads

    @initialize(
        num_blocks=st.integers(6, 24),
        num_seqs=st.integers(3, 8),
        budget=st.integers(8, 64),
        caching=st.booleans(),
        host_bytes=st.sampled_from([100, 1000]),
        depth=st.sampled_from([0, 1]),
        landing=st.sampled_from([0, 0, 2]),
        turn=st.sampled_from([2, 10]),
    )
    def start(
        self,
        num_blocks: int,
        num_seqs: int,
        budget: int,
        caching: bool,
        host_bytes: int,
        depth: int,
        landing: int,
        turn: int,
    ) -> None:
        self.now = 0.0
        self.engine = make_engine(
            num_blocks=num_blocks,
            num_pages=3,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_num_waiting=30,
            enable_prefix_caching=caching,
            host_bytes=host_bytes,
            ends_bytes=ENDS_BYTES,
            depth=depth,
            clock=lambda: self.now,
        )
        self.engine.runner.landing_steps = landing
        self.threads = ManualThreads()
        self.engine.tiers.close()
        self.engine.tiers._pool = self.threads  # type: ignore[assignment]
        for name, properties in ADAPTERS.items():
            if name != "missing":
                self.engine.store.add(name, **properties)
        self.pins: set[bytes] = set()
        self.prefetches: list[Future[str]] = []
        turns.LEAST_TURN = turn
        self.requests: dict[tuple[str, int], Request] = {}
        self.number = 0

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=4))
    def submit(self, wishes: list[dict[str, Any]]) -> None:
        for wish in wishes:
            self.number += 1
            request = self._make(wish)
            num_blocks = self.engine.pool.num_blocks
            if len(request.prompt) < num_blocks * 16 and request.most_blocks <= num_blocks:
                self.requests[wish["link"], self.number] = request
                self.engine.scheduler.add(request)

    def _make(self, wish: dict[str, Any]) -> Request:
        arguments: dict[str, Any] = {
            "prompt": [wish["base"] * 100 + index // 20 for index in range(wish["length"])],
            "adapter": wish["adapter"],
            "adapter_start": min(wish["start"], wish["length"] - 1) if wish["adapter"] else 0,
            "max_tokens": wish["max_tokens"],
            "max_model_len": self.engine.pool.num_blocks * 16,
            "stop": range(0, VOCAB_SIZE, 20) if wish["stop"] else (),
        }
        if wish["search"] is not None:
            arguments["search"] = {"early_stopping": wish["search"], "length_penalty": wish["priority"]}
            arguments["stop"] = range(3) if wish["stop"] else ()
            wish = wish | {"known": 0, "only": False}
        alone = wish["n"] == 1 and not wish["stop"]
        known = expected_output(make_request(**arguments))[: wish["known"]] if alone else []
        if wish["only"]:
            known, arguments["max_tokens"] = [], 1
        return make_request(
            **arguments,
            output=known,
            prompt_logprobs=wish["scored"],
            prompt_only=wish["only"],
            request_id=self.number,
            link=wish["link"],
            n=wish["n"],
            tenant=f"tenant-{wish['tenant']}",
            background=wish["background"],
            scope="shared" if wish["tenant"] else "private",
            weight=1.0 + wish["tenant"],
            priority=wish["priority"],
            arrival=self.now,
            deadline=None if wish["patience"] is None else self.now + wish["patience"],
        )

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        self._step(count)

    @rule(count=st.integers(10, 30))
    def step_on(self, count: int) -> None:
        self._step(count)

    def _step(self, count: int) -> None:
        for _ in range(count):
            pinned = self.engine.pages.pinned()
            plan = self.engine.step()
            self.now += 1.0
            self._check_adapters(pinned)
            if not plan.rows and not self.threads.waiting:
                again = self.engine.step()
                assert again.rows or not self.engine.scheduler.num_waiting, "somebody waits, for nothing"

    def _check_adapters(self, were_pinned: frozenset[bytes]) -> None:
        """What holds after each step, worked out anew from what is here, without the gate's own books."""
        engine = self.engine
        residents = engine.pages.residents()
        sizes = {digest: engine.store.adapters[digest] for digest in residents}
        assert sum(sizes[digest].num_pages for digest in residents) <= engine.pages.num_pages
        assert sum(sizes[digest].ends_bytes for digest in residents) <= ENDS_BYTES
        for seq in engine.scheduler._running:
            if seq.adapter is not None:
                assert residents[seq.request.adapter_digest] == seq.adapter, "its pages were given away"
        for digest in were_pinned & self.pins - residents.keys():
            others = [engine.store.adapters[other] for other in were_pinned]
            assert any(
                copy.num_pages + sum(other.num_pages for other in others) > engine.pages.num_pages
                or copy.ends_bytes + sum(other.ends_bytes for other in others) > ENDS_BYTES
                for copy in sizes.values()
            ), f"{digest.hex()} was pinned, and went for one that would have had room"
        for digest in engine.tiers.loading():
            waits = any(seq.request.adapter_digest == digest for seq in engine.scheduler._waiting)
            # One begun for a sequence that has just started, from a copy that its claim held, ends in a step.
            assert waits or digest in residents or engine.gate._ahead.wants(digest), "a load nobody wants"
        assert set(engine.tiers.held()) <= set(engine.store.reads)
        assert engine.runner.ends.keys() <= set(range(engine.pages.num_pages))

    @precondition(lambda self: self.threads.waiting)
    @rule(data=st.data())
    def finish_a_load(self, data: st.DataObject) -> None:
        self.threads.run(data.draw(st.integers(0, len(self.threads.waiting) - 1)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), choice=st.sampled_from([None, None, 0, 1, 2]))
    def abort(self, data: st.DataObject, choice: int | None) -> None:
        link, number = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.scheduler.abort(link, number, choice)

    @rule(
        what=st.sampled_from(["disconnect", "failure", "unload", "prefetch", "give-up", "pin", "expect"]),
        link=st.sampled_from(LINKS),
        adapter=st.sampled_from(sorted(ADAPTERS)),
    )
    def mishap(self, what: str, link: str, adapter: str) -> None:
        scheduler, gate = self.engine.scheduler, self.engine.gate
        if what == "disconnect":
            scheduler.abort_link(link)
            self.requests = {key: request for key, request in self.requests.items() if key[0] != link}
        elif what == "failure":
            plan = scheduler.schedule()
            self.engine.take_in()
            scheduler.fail(plan, "it broke")
        elif what == "unload":
            gate.unload(digest_of(adapter))
        elif what == "prefetch":
            self.prefetches.append(Future())
            gate.prefetch(digest_of(adapter), self.prefetches[-1])
        elif what == "give-up":
            self.prefetches = [prefetch for prefetch in self.prefetches if not prefetch.cancel()]
        elif what == "pin":
            self.pins ^= {digest_of(adapter)}
            gate.pin(frozenset(self.pins))
        else:
            gate.begin_load(digest_of(adapter))
            gate.expect(digest_of(adapter))

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            self.engine.collect()
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            while self.threads.waiting:
                self.threads.run()
            self.engine.step()
            self.now += 0.01
            if not self.engine.scheduler.num_running + self.engine.scheduler.num_waiting:
                break
        self.engine.step()
        self.engine.check_all_free()
        turns.LEAST_TURN = LEAST_TURN
        self._check_that_all_can_go()
        for (link, number), request in self.requests.items():
            for choice in range(len(request.sampling)):
                self._check_answer((link, number, choice), request, choice)

    def _check_that_all_can_go(self) -> None:
        """Unloads everything: nothing stays behind, in whatever tier."""
        engine = self.engine
        engine.gate.pin(frozenset())
        for prefetch in self.prefetches:
            prefetch.cancel()
        for name in ADAPTERS:
            engine.gate.unload(digest_of(name))
        for _ in range(20):
            engine.step()
            while self.threads.waiting:
                self.threads.run()
        engine.runner.flush()
        assert engine.gate.statuses() == [] and engine.tiers.host_bytes == 0 and not engine.tiers.is_loading
        assert engine.store.local == set() and engine.runner.ends == {}
        assert engine.pages.num_free == engine.pages.num_pages

    def _check_answer(self, key: tuple[str, int, int], request: Request, choice: int) -> None:
        reason, error = self.engine.finished[key]
        tokens = self.engine.tokens.get(key, [])
        if request.beams is not None:
            expected = expected_answers(request)[choice]
            assert not tokens or reason in ("LENGTH", "STOP"), "an answer of a search that has not ended well"
            assert self.engine.searched.get(key[:2], 0) % request.beams.width == 0
        else:
            expected = [] if request.prompt_only else expected_output(request, choice)
        told = self.engine.told.get(key[:2], [])
        scored = request.prompt[1:] if request.prompt_logprobs is not None else []
        assert told == scored[: len(told)], "what is told of a prompt is not its tokens"
        # One that has come with all tokens that it may have ends before it starts.
        if tokens or (reason in ("LENGTH", "STOP") and key[:2] in self.engine.started):
            assert len(told) == len(scored), "an answer before all of its prompt was told"
        assert tokens == expected[: len(tokens)], "an answer is not what the request gives alone"
        if reason in ("LENGTH", "STOP"):
            assert len(tokens) == len(expected)
        if reason == "ERROR":
            assert error
        if request.adapter_digest == digest_of("poison"):
            assert not tokens


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
