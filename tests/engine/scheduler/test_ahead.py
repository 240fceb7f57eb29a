"""What is brought ahead of need: announcements, prefetches and pins; and loads that nobody wants any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from builders import Engine, digest_of, expected_output, hold_reads, make_engine, make_request, step_until

from engine.adapter_status import Residency
from engine.adapter_tiers import MAX_LOADS, NUM_LOAD_THREADS
from engine.host_copy import HostCopy
from engine.scheduler.ahead import EXPECTED_SECONDS, PIN_RETRY_SECONDS


@dataclass
class Clock:
    """A clock that stands until it is told."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def settle(engine: Engine, steps: int = 10) -> None:
    """Lets loads end, and the gate act on them."""
    for _ in range(steps):
        engine.step()
        while engine.tiers.is_loading:
            engine.wait_for_loads()
            engine.step()


def held_reads(engine: Engine) -> tuple[threading.Event, list[bytes]]:
    """Makes loads take until the event is set; the list has those that have begun."""
    begun: list[bytes] = []
    released = hold_reads(engine)
    read = engine.tiers._read

    def noting_read(digest: bytes) -> HostCopy:
        begun.append(digest)
        return read(digest)

    engine.tiers._read = noting_read
    return released, begun


def test_a_load_whose_last_request_has_gone_is_dropped_if_it_has_not_begun() -> None:
    engine = make_engine()
    released, begun = held_reads(engine)
    count = NUM_LOAD_THREADS + 1
    for number in range(count):
        engine.store.add(f"a{number}")
        for choice in range(2):
            name = f"a{number}"
            request = make_request(
                5, request_id=2 * number + choice, adapter=name, tenant=f"tenant of {name}"
            )
            engine.scheduler.add(request)
    while len(begun) < NUM_LOAD_THREADS:
        engine.wait_for_loads()
    last = digest_of(f"a{count - 1}")
    engine.scheduler.abort("link", 2 * count - 1)
    engine.step()
    assert engine.tiers.is_loading_one(last), "one request waits for it yet"
    engine.scheduler.abort("link", 2 * count - 2)
    engine.scheduler.abort_link("another")
    engine.step()
    assert not engine.tiers.is_loading_one(last) and engine.tiers.counters.loads_cancelled == 1
    for number in range(2 * count):
        engine.scheduler.abort("link", number)
    engine.step()
    assert engine.tiers.loading() == begun, "what is being read is read to its end"
    released.set()
    settle(engine)
    assert set(engine.tiers.held()) == set(begun) == set(engine.store.reads)
    engine.check_all_free()
    engine.close()


def test_an_announced_adapter_is_read_and_an_announcement_is_forgotten_in_time() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    digest = engine.store.add("a")
    engine.gate.expect(digest)
    settle(engine)
    assert engine.gate.status(digest).residency is Residency.HOST, "the device is for those who are here"
    released = hold_reads(engine)
    others = [engine.store.add(f"b{number}") for number in range(2 * MAX_LOADS)]
    for other in others:
        engine.gate.expect(other)
    engine.step()
    assert len(engine.tiers.loading()) == MAX_LOADS // 2, "half of the loads are kept for who waits"
    engine.scheduler.add(make_request(5, request_id=1, adapter="b7"))
    engine.step()
    assert engine.tiers.is_loading_one(others[7])
    clock.now += EXPECTED_SECONDS
    released.set()
    settle(engine)
    assert set(engine.store.reads) == {digest, *others[: MAX_LOADS // 2], others[7]}
    assert engine.finished["link", 1, 0][0] == "LENGTH"
    engine.close()


def test_a_prefetch_takes_no_room_from_others_and_can_be_given_up() -> None:
    engine = make_engine(num_pages=1, num_blocks=128)
    for name in "abc":
        engine.store.add(name, 16)
    engine.scheduler.add(make_request(5, request_id=1, adapter="a", max_tokens=100))
    step_until(engine, 1)
    given_up: Future[str] = Future()
    patient: Future[str] = Future()
    engine.gate.prefetch(digest_of("b"), given_up)
    engine.gate.prefetch(digest_of("c"), patient)
    settle(engine)
    assert not patient.done() and engine.gate.claim is None
    given_up.cancel()
    engine.run()
    settle(engine)
    assert patient.result(0) == ""
    assert [status.digest for status in engine.gate.statuses() if status.num_pages] == [digest_of("c")]
    engine.close()


def test_pinned_adapters_come_by_themselves_and_stay() -> None:
    engine = make_engine(num_pages=4, num_blocks=256)
    pinned = frozenset(engine.store.add(name, 16) for name in ("p1", "p2"))
    engine.gate.pin(pinned)
    settle(engine)
    assert all(engine.gate.status(digest).is_pinned for digest in pinned)
    for number in range(12):
        engine.store.add(f"a{number}", 16 if number % 2 else 32)
        engine.scheduler.add(make_request(5, request_id=number, adapter=f"a{number}", max_tokens=40))
    while engine.scheduler.num_running + engine.scheduler.num_waiting:
        if not engine.step().rows:
            engine.wait_for_loads()
        assert all(engine.gate.status(digest).is_pinned for digest in pinned)
    engine.gate.pin(frozenset())
    engine.store.add("large", 64)
    engine.scheduler.add(make_request(5, request_id=99, adapter="large"))
    engine.run()
    assert engine.gate.status(digest_of("large")).num_pages == 4
    engine.check_all_free()
    engine.close()


def test_pins_beyond_half_of_the_pages_are_kept_in_host_memory() -> None:
    """Before those that are on the device anyway, though it is the larger one, which would go first."""
    engine = make_engine(num_pages=4, host_bytes=350)
    digests = [engine.store.add(f"p{number}", rank) for number, rank in enumerate((16, 16, 48))]
    engine.gate.pin(frozenset(digests))
    settle(engine)
    assert [engine.gate.status(digest).is_pinned for digest in digests] == [True, True, False]
    for number in range(5):
        engine.store.add(f"a{number}", 32, nbytes=200)
        engine.scheduler.add(make_request(5, request_id=number, adapter=f"a{number}"))
        engine.run()
    assert engine.tiers.has(digests[2]) and not engine.tiers.has(digests[0])
    assert engine.store.reads.count(digests[2]) == 1
    engine.close()


def test_an_adapter_too_large_to_come_beside_pinned_ones_comes_all_the_same_and_they_come_back() -> None:
    engine = make_engine(num_pages=4, num_blocks=128)
    pinned = engine.store.add("pinned", 16)
    engine.store.add("large", 64)
    engine.gate.pin(frozenset({pinned}))
    settle(engine)
    engine.scheduler.add(make_request(5, request_id=1, adapter="pinned", max_tokens=300))
    step_until(engine, 1)
    engine.scheduler.add(make_request(5, request_id=2, adapter="large", max_tokens=20))
    step_until(engine, 2)
    engine.run()
    settle(engine)
    for number, name in ((1, "pinned"), (2, "large")):
        request = make_request(5, adapter=name, max_tokens=300 if number == 1 else 20)
        assert engine.tokens["link", number, 0] == expected_output(request)
    assert engine.gate.status(pinned).is_pinned
    engine.close()


def test_a_pinned_adapter_that_cannot_be_read_is_tried_again_now_and_then() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    missing = digest_of("late")
    engine.gate.pin(frozenset({missing}))
    settle(engine, 30)
    assert engine.store.reads == [missing]
    engine.gate.pin(frozenset({missing}))
    settle(engine)
    assert engine.store.reads == [missing], "to hear of it again changes nothing"
    engine.store.add("late")
    clock.now += PIN_RETRY_SECONDS
    settle(engine)
    assert engine.gate.status(missing).is_pinned
    engine.close()


def test_pins_for_which_no_memory_has_room_are_tried_again_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    engine = make_engine(num_pages=8, host_bytes=400, clock=clock)
    digests = frozenset(engine.store.add(f"p{number}", 16) for number in range(12))
    engine.gate.pin(digests)

    def reads(steps: int = 40) -> int:
        before = len(engine.store.reads)
        for _ in range(steps):
            engine.step()
            while engine.scheduler.is_loading and engine.tiers._done.empty():
                engine.wait_for_loads()
            engine.gate.pin(digests)
        return len(engine.store.reads) - before

    assert 8 <= reads() <= 12
    assert not reads() and not engine.scheduler.is_loading, "an engine without work sleeps"
    assert len(engine.pages.pinned()) == 4 and len(engine.tiers.held()) == 4
    clock.now += PIN_RETRY_SECONDS
    assert 1 <= reads() <= 12
    assert not reads()
    engine.scheduler.add(make_request(5, request_id=1, adapter="p0"))
    engine.run()
    assert engine.finished["link", 1, 0][0] == "LENGTH"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "no room for all 12 pinned adapters" in told[0] and "--lora-host" in told[0]
    engine.close()


def test_what_is_unloaded_goes_even_if_it_was_pinned() -> None:
    engine = make_engine()
    digest = engine.store.add("a")
    engine.gate.pin(frozenset({digest}))
    settle(engine)
    engine.gate.unload(digest)
    settle(engine)
    assert engine.gate.statuses() == [] and engine.store.local == set()
    engine.gate.pin(frozenset({digest}))
    settle(engine)
    assert engine.gate.status(digest).is_pinned, "the registry has the last word"
    engine.close()


def test_a_copy_under_way_delays_nobody_but_who_asked_for_it() -> None:
    engine = make_engine()
    landed = False
    write = engine.runner.write_adapter

    def slow_write(pages: Sequence[int], copy: HostCopy) -> Callable[[], bool]:
        write(pages, copy)
        return lambda: landed

    engine.gate._placements._write = slow_write
    engine.store.add("a")
    engine.scheduler.add(make_request(5, request_id=1, max_tokens=60))
    engine.step()
    engine.scheduler.add(make_request(5, request_id=2, adapter="a", max_tokens=5))
    settle(engine)
    assert engine.gate.status(digest_of("a")).residency is Residency.DEVICE
    assert ("link", 2) not in engine.started
    landed = True
    assert step_until(engine, 2) == 1
    landed = False
    engine.run()
    engine.store.add("b")
    engine.scheduler.add(make_request(5, request_id=3, adapter="b", max_tokens=5))
    engine.run()
    assert ("link", 3) in engine.started, "when nothing else runs, a step may wait for the copy"
    engine.close()


def test_weights_outside_the_pages_have_a_bound_and_wait_their_turn() -> None:
    engine = make_engine(num_pages=8, num_blocks=256, ends_bytes=100)
    for number in range(6):
        engine.store.add(f"a{number}", 16, ends_bytes=60 if number % 2 else 30, has_vectors=number > 3)
    requests = [
        make_request(5, request_id=number, adapter=f"a{number % 6}", max_tokens=90) for number in range(12)
    ]
    for request in requests:
        engine.scheduler.add(request)
    engine.run()
    for request in requests:
        assert engine.tokens["link", request.request_id, 0] == expected_output(request)
    engine.check_all_free()
    engine.store.add("huge", ends_bytes=101)
    engine.scheduler.add(make_request(5, request_id=99, adapter="huge"))
    engine.run()
    assert "needs 101 bytes for its embedding and lm_head" in engine.finished["link", 99, 0][1]
    engine.close()
