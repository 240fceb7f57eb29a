"""What the queue takes, what it says when it does not, and whose place is whose."""

from __future__ import annotations

import pytest
from builders import Engine, make_engine, make_request

from engine.outputs import Finished
from engine.scheduler import SchedulerLimits
from engine.scheduler.queue_bounds import MOST_RETRY_SECONDS, QueueBounds
from engine.sequence import Refusal


def refusal(bounds: QueueBounds, tenant: str, count: int, *, waiting: int, held: int) -> Refusal | None:
    refused = bounds.refused(tenant, count, waiting=waiting, held=held)
    return refused.refusal if refused else None


def test_a_tenant_may_hold_as_many_places_as_it_leaves_free() -> None:
    bounds = QueueBounds(10, clock=lambda: 0.0)
    assert refusal(bounds, "a", 1, waiting=4, held=4) is None
    assert refusal(bounds, "a", 1, waiting=5, held=5) is Refusal.TENANT_QUEUE_FULL
    assert refusal(bounds, "a", 2, waiting=4, held=4) is None
    assert refusal(bounds, "a", 3, waiting=4, held=4) is Refusal.TENANT_QUEUE_FULL
    assert refusal(bounds, "b", 1, waiting=9, held=0) is None
    assert refusal(bounds, "b", 1, waiting=10, held=0) is Refusal.QUEUE_FULL
    assert refusal(bounds, "a", 6, waiting=5, held=5) is Refusal.TENANT_QUEUE_FULL, "its own flood"
    assert refusal(bounds, "a", 6, waiting=5, held=2) is Refusal.QUEUE_FULL, "mostly others'"
    assert refusal(bounds, "a", 10, waiting=1, held=1) is Refusal.TENANT_QUEUE_FULL
    assert refusal(bounds, "a", 11, waiting=0, held=0) is Refusal.QUEUE_FULL, "nothing of it is here"
    assert bounds.figures() == {"refused_queue": 3, "refused_tenant_queue": 4}


def test_an_idle_engine_takes_as_many_choices_as_it_says() -> None:
    engine = make_engine(max_num_seqs=8, max_num_waiting=4)
    assert SchedulerLimits(max_num_seqs=8, max_num_waiting=4).max_choices == 4
    assert SchedulerLimits(max_num_seqs=8, max_num_waiting=40).max_choices == 8
    engine.scheduler.add(make_request(10, n=4, max_tokens=2))
    engine.run()
    assert [reason for reason, _ in engine.finished.values()] == ["LENGTH"] * 4
    engine.close()


def test_when_to_come_back_follows_from_the_rate_of_starts() -> None:
    now = 0.0
    bounds = QueueBounds(10, clock=lambda: now)
    unknown = bounds.refused("a", 1, waiting=10, held=9)
    assert unknown is not None and unknown.retry_after_s == 0.0
    for number in range(5):
        now = 2.0 * number
        bounds.note_start("a" if number % 2 else "b", 1)
    now = 10.0
    # Five started within ten seconds, two of them a's.
    full = bounds.refused("c", 3, waiting=10, held=0)
    assert full is not None and full.retry_after_s == pytest.approx(3 * 10 / 5)
    # Of eight that a holds it leaves one free: after four have left, it is four and five.
    own = bounds.refused("a", 1, waiting=8, held=8)
    assert own is not None and own.retry_after_s == pytest.approx(4 * 10 / 2)
    now = 1000.0
    late = bounds.refused("c", 3, waiting=10, held=0)
    assert late is not None and late.retry_after_s == MOST_RETRY_SECONDS


def ends(engine: Engine) -> list[Finished]:
    return [end for out in engine.scheduler.take_outputs().values() for end in out.finished]


def test_the_links_of_several_gateways_are_one_queue() -> None:
    """A tenant's flood through two gateways fills its own half once, and is served as one tenant's."""
    engine = make_engine(num_blocks=64, max_num_seqs=1, max_num_waiting=10, max_num_batched_tokens=64)
    scheduler = engine.scheduler
    for number in range(5):
        for link in ("gateway-1", "gateway-2"):
            scheduler.add(make_request(10, link=link, request_id=number, tenant="flood", max_tokens=2))
    assert [end.refusal for end in ends(engine)] == [Refusal.TENANT_QUEUE_FULL] * 5
    for link in ("gateway-1", "gateway-2"):
        scheduler.add(make_request([1] * 10, link=link, request_id=7, tenant="other", max_tokens=2))
    for _ in range(10):
        engine.step()
    assert {("gateway-1", 7), ("gateway-2", 7)} <= engine.started.keys()
    order = list(engine.started)
    assert [who[1] == 7 for who in order[:4]] == [False, True, False, True], "by turns, as two tenants are"
    engine.run()
    assert len(engine.started) == 7
    engine.close()


def test_a_request_of_several_choices_is_refused_as_a_whole() -> None:
    engine = make_engine(max_num_waiting=4)
    engine.scheduler.add(make_request(10, request_id=1, n=3))
    engine.scheduler.add(make_request(10, request_id=2, n=2))
    assert [(end.choice, end.refusal) for end in ends(engine)] == [
        (0, Refusal.TENANT_QUEUE_FULL),
        (1, Refusal.TENANT_QUEUE_FULL),
    ]
    engine.run()
    engine.close()
