"""The loop: what crosses its two doors, and what it does when a step fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from builders import Engine, FakeAdapter, PendingResult, digest_of, expected_output, make_engine, make_request

from engine import adapter_tiers
from engine.loop import MAX_FAILED_STEPS, EngineLoop
from engine.outputs import LinkOutput
from engine.sequence import Failure
from engine.step import StepPlan


class Running:
    """A loop in its thread, and what it has delivered."""

    def __init__(self, engine: Engine, news: threading.Event, *, overlap: bool) -> None:
        self.engine = engine
        self.loop = EngineLoop(engine.scheduler, engine.runner, engine.gate, news, overlap=overlap)
        self.fatal = threading.Event()
        self.deliveries: list[Mapping[Hashable, LinkOutput]] = []
        self.loop.start(self.deliveries.append, self.fatal.set)

    def finished(self) -> dict[tuple[Hashable, int, int], tuple[str, str]]:
        return {
            (link, end.request_id, end.choice): (end.reason.name, end.error)
            for news in list(self.deliveries)
            for link, output in news.items()
            for end in output.finished
        }

    def tokens(self, link: str, request_id: int) -> list[int]:
        return [
            token
            for news in list(self.deliveries)
            for number, token in zip(news[link].request_ids, news[link].tokens, strict=True)
            if number == request_id
        ]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.001)


@pytest.fixture(params=[False, True], ids=["in-turn", "overlapped"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    news = threading.Event()
    engine = make_engine(wake=news.set)
    made = Running(engine, news, overlap=request.param)
    yield made
    made.loop.stop()
    engine.close()


def test_a_request_comes_in_and_its_tokens_come_out(running: Running) -> None:
    request = make_request(20, max_tokens=10)
    running.loop.submit(request)
    running.wait_for(lambda: bool(running.finished()))
    assert running.tokens("link", 1) == expected_output(request)
    assert all(len(news) == 1 for news in running.deliveries), "one delivery per step, by link"
    assert len(running.deliveries) == 11, "the start, and then a token in each"


def test_an_idle_loop_is_woken_by_a_load_that_ends(running: Running) -> None:
    released = threading.Event()
    running.engine.store.add("a")
    read = running.engine.store.read

    def slow_read(digest: bytes) -> FakeAdapter:
        assert released.wait(60)
        return read(digest)

    running.engine.tiers._read = slow_read
    running.loop.submit(make_request(adapter="a"))
    running.wait_for(lambda: running.engine.scheduler.is_loading)
    steps = running.engine.runner.num_steps
    released.set()
    running.wait_for(lambda: bool(running.finished()))
    assert steps == 0 and running.finished()["link", 1, 0][0] == "LENGTH"


def test_an_idle_loop_sleeps(running: Running) -> None:
    running.loop.submit(make_request(20, max_tokens=2))
    running.wait_for(lambda: bool(running.finished()))
    assert running.loop.status().result(10).running == 0
    plans, schedule = 0, running.engine.scheduler.schedule

    def counted() -> StepPlan:
        nonlocal plans
        plans += 1
        return schedule()

    running.engine.scheduler.schedule = counted  # type: ignore[method-assign]
    time.sleep(0.05)
    assert plans < 5, "it may have been on its way to sleep"


def test_a_deadline_passes_in_an_idle_loop(running: Running) -> None:
    released = threading.Event()

    def stuck_read(digest: bytes) -> FakeAdapter:
        released.wait(60)
        return FakeAdapter(digest)

    running.engine.tiers._read = stuck_read
    running.loop.submit(make_request(adapter="stuck", deadline=time.monotonic() + 0.05))
    running.wait_for(lambda: bool(running.finished()))
    assert running.finished()["link", 1, 0][0] == "DEADLINE"
    released.set()


def test_the_loop_does_not_sleep_while_who_gave_way_for_nothing_waits() -> None:
    """Background work gives its seat to a request that only then turns out to be at fault, while something
    else is loaded. Without overlap that plan is empty."""
    news, released = threading.Event(), threading.Event()
    engine = make_engine(max_num_seqs=1, wake=news.set)
    digest, read = engine.store.add("a"), engine.store.read

    def slow_read(digest: bytes) -> FakeAdapter:
        assert digest != digest_of("slow") or released.wait(60)
        return read(digest)

    engine.tiers._read = slow_read
    loop = EngineLoop(engine.scheduler, engine.runner, engine.gate, news)
    answer = loop.prefetch(digest)
    deadline = time.monotonic() + 60
    while not answer.done():
        assert time.monotonic() < deadline, "it is not loaded"
        loop.step(lambda outputs: None)
    loop.submit(make_request(5, request_id=1, max_tokens=50, background=True))
    loop.submit(make_request(5, request_id=2, tenant="another", adapter="slow", background=True))
    assert loop.step(lambda outputs: None)
    loop.submit(make_request(5, request_id=3, adapter="a", vocab_size=5000))
    assert not loop.step(lambda outputs: None)
    news.clear()  # as by a turn before
    waiting = threading.Thread(target=loop._wait, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive(), "it waits for the load"
    assert loop.step(lambda outputs: None) and engine.scheduler.is_loading
    released.set()
    engine.close()


def test_a_read_that_hangs_is_told_by_an_idle_loop(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """To whoever waits for it, and to whoever asks afterwards."""
    released = threading.Event()

    def stuck_read(digest: bytes) -> FakeAdapter:
        released.wait(60)
        return FakeAdapter(digest)

    running.engine.tiers._read = stuck_read
    running.engine.store.local.add(digest_of("stuck"))
    monkeypatch.setattr(adapter_tiers, "READ_SECONDS", 0.1)
    running.loop.submit(make_request(adapter="stuck"))
    running.wait_for(lambda: bool(running.finished()))
    reason, error = running.finished()["link", 1, 0]
    assert reason == "ERROR" and "could not be read in" in error
    (end,) = [end for news in running.deliveries for output in news.values() for end in output.finished]
    assert end.failure is Failure.STORE_UNAVAILABLE
    for _ in range(2):
        assert "could not be read in" in running.loop.prefetch(digest_of("stuck")).result(60)
    released.set()


def test_a_failed_step_ends_its_own_requests_and_the_loop_goes_on(running: Running) -> None:
    failures = iter([RuntimeError("once")])

    def fail_once(plan: StepPlan) -> None:
        for error in failures:
            raise error

    running.engine.runner.before = fail_once
    running.loop.submit(make_request(request_id=1))
    running.wait_for(lambda: len(running.finished()) == 1)
    running.loop.submit(make_request(request_id=2))
    running.wait_for(lambda: len(running.finished()) == 2)
    reason, error = running.finished()["link", 1, 0]
    assert reason == "ERROR" and "failed: RuntimeError" in error
    assert running.finished()["link", 2, 0][0] == "LENGTH"
    assert not running.fatal.is_set()
    running.engine.check_all_free()


def test_a_draw_that_waited_and_fails_ends_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step under way what a grammar allows is asked for after that has been taken in."""
    engine, news = make_engine(), LinkOutput()
    failures = iter([RuntimeError("once")])
    planned: list[int] = []
    engine.runner.before = lambda plan: planned.extend(row.seq_id for row in plan.rows)

    def draw(_: PendingResult) -> None:
        for error in failures:
            raise error

    monkeypatch.setattr(PendingResult, "draw", draw)
    loop = EngineLoop(engine.scheduler, engine.runner, engine.gate, threading.Event(), overlap=True)
    for number in (1, 2):
        loop.submit(make_request(request_id=number, max_tokens=6))
        for _ in range(12):
            loop.step(lambda outputs: news.merge(outputs["link"]))
    first, second = news.finished
    assert first.reason.name == "ERROR" and "failed: RuntimeError" in first.error
    assert (second.request_id, second.reason.name) == (2, "LENGTH")
    assert news.request_ids.count(1) == 1, "what came before was told"
    assert planned.count(1) == 2, "and nothing was planned upon it"
    engine.check_all_free()
    engine.close()


def test_steps_that_keep_failing_end_the_loop(running: Running) -> None:
    asked: list[Future[Any]] = []

    def fail(plan: StepPlan) -> None:
        asked.append(running.loop.status())
        raise RuntimeError("for good")

    running.engine.runner.before = fail
    for number in range(MAX_FAILED_STEPS):
        assert not running.fatal.is_set()
        running.loop.submit(make_request(request_id=number))
        running.wait_for(lambda number=number: len(running.finished()) == number + 1)
    assert running.fatal.wait(60)
    asked += [running.loop.status(), running.loop.prefetch(digest_of("a"))]
    assert [question.cancelled() for question in asked] == [False, False, True, True, True]
    assert not running.loop._unanswered


def test_draining_refuses_what_is_new_and_ends_what_runs(running: Running) -> None:
    running.engine.runner.step_s = 0.002
    running.loop.submit(make_request(request_id=1, max_tokens=20))
    running.loop.drain()
    running.loop.submit(make_request(request_id=2))
    running.wait_for(lambda: len(running.finished()) == 2)
    assert running.finished()["link", 1, 0][0] == "LENGTH"
    reason, error = running.finished()["link", 2, 0]
    assert reason == "REFUSED" and "about to stop" in error


def test_status_prefetch_pin_and_unload_are_answered(running: Running) -> None:
    digest = running.engine.store.add("a", rank=20)
    assert running.loop.prefetch(digest).result(10) == ""
    status = running.loop.status().result(10)
    assert (status.running, status.waiting, status.free_blocks) == (0, 0, 64)
    (adapter,) = running.loop.adapters().result(10)
    assert status.residency == {digest: adapter.residency}
    assert adapter == running.loop.adapter(digest).result(10)
    assert (adapter.digest, adapter.rank, adapter.num_pages) == (digest, 20, 2)
    assert "no such adapter" in running.loop.prefetch(digest_of("missing")).result(10)
    running.loop.pin(frozenset({digest}))
    running.wait_for(lambda: running.loop.adapter(digest).result(10).is_pinned)
    running.loop.unload(digest)
    running.wait_for(lambda: not running.loop.status().result(10).residency)


def test_a_closed_link_frees_everything_within_a_step(running: Running) -> None:
    running.engine.runner.step_s = 0.005
    for number in range(5):
        running.loop.submit(make_request(request_id=number, max_tokens=400, n=2))
    running.wait_for(lambda: running.loop.status().result(10).running > 0)
    running.loop.close_link("link")
    status = running.loop.status().result(10)
    assert (status.running, status.waiting, status.free_blocks) == (0, 0, 64)
    assert running.finished() == {}


@pytest.mark.parametrize("how", ["submit", "expect"])
def test_an_adapter_is_read_while_the_loop_is_busy(how: str) -> None:
    """The loop takes in nothing until its step ends; here, it has not even begun."""
    engine = make_engine()
    digest = engine.store.add("cold", 16)
    loop = EngineLoop(engine.scheduler, engine.runner, engine.gate, threading.Event())
    if how == "submit":
        loop.submit(make_request(5, request_id=1, adapter="cold", max_tokens=2))
    else:
        loop.expect(digest)
    deadline = time.monotonic() + 60
    while engine.tiers._done.empty():
        assert time.monotonic() < deadline, "it waits for the loop"
        time.sleep(0.001)
    news: list[Mapping[Hashable, LinkOutput]] = []
    loop.step(news.append)
    assert engine.tiers.has(digest) and engine.store.reads == [digest], "and it is read once"
    assert (("link", 1) in engine.scheduler._roster) == (how == "submit")
    engine.close()
