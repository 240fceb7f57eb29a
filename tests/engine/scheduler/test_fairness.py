"""Virtual token counters, and the order in which the queue proposes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from builders import Engine, digest_of, hold_reads, make_engine, make_request, step_until
from hypothesis import given
from hypothesis import strategies as st

from engine.adapter_tiers import MAX_LOADS
from engine.scheduler.background import account_name
from engine.scheduler.fairness import VirtualTokenCounters
from engine.scheduler.waiting import LEAST_AWAY, MOST_AWAY, WaitingQueue
from engine.sequence import Sequence, Status


def test_a_tenant_that_comes_back_is_lifted_to_the_least_of_those_who_wait() -> None:
    counters = VirtualTokenCounters()
    counters.arrive("idle", 1)
    counters.depart("idle")
    counters.arrive("busy", 1)
    counters.arrive("busier", 1)
    counters.charge_input("busy", 100)
    counters.charge_input("busier", 300)
    counters.arrive("idle", 1)
    assert counters.account("idle").served == 100
    counters.depart("idle")
    counters.charge_input("idle", 500)
    counters.arrive("idle", 1)
    assert counters.account("idle").served == 600, "a lift never takes service away"


def test_when_nobody_waits_the_last_who_left_is_the_measure() -> None:
    counters = VirtualTokenCounters()
    counters.arrive("one", 1)
    counters.charge_input("one", 70)
    counters.depart("one")
    counters.arrive("two", 1)
    assert counters.account("two").served == 70


def test_background_work_and_the_others_are_no_measure_for_each_other() -> None:
    counters = VirtualTokenCounters()
    work, more_work = (account_name(name, background=True) for name in ("work", "more work"))
    for tenant, tokens in (("busy", 500), (work, 100)):
        counters.arrive(tenant, 1)
        counters.charge_input(tenant, tokens)
    for tenant, served in (("new", 500), (more_work, 100)):
        counters.arrive(tenant, 1)
        assert counters.account(tenant).served == served
        counters.depart(tenant)
    counters.depart("busy")
    counters.depart(work)
    assert [counters.account(name).served for name in ("late", account_name("late", background=True))] == [
        500,
        100,
    ], "nor when nobody waits"


def test_service_is_divided_by_the_weight_and_output_costs_twice() -> None:
    counters = VirtualTokenCounters()
    counters.arrive("heavy", 4)
    counters.charge_input("heavy", 40)
    counters.charge_output("heavy", 10)
    assert counters.account("heavy").served == 40 / 4 + 2 * 10 / 4


def test_idle_tenants_are_forgotten_when_that_changes_nothing() -> None:
    counters = VirtualTokenCounters()
    for number in range(5000):
        counters.arrive(f"tenant-{number}", 1)
        counters.depart(f"tenant-{number}")
    assert len(counters._accounts) <= 1025
    counters.arrive("steady", 1)
    counters.arrive("debtor", 1)
    counters.charge_output("debtor", 1000)
    counters.depart("debtor")
    for number in range(5000):
        counters.arrive(f"again-{number}", 1)
        counters.depart(f"again-{number}")
    assert counters.account("debtor").served == 2000
    assert len(counters._accounts) <= 1026


def propose(queue: WaitingQueue, take: int, refuse: frozenset[str] = frozenset()) -> list[int]:
    """Takes up to ``take`` proposals, leaving those of the tenants in ``refuse``; returns request ids."""
    taken: list[int] = []
    for seq in queue.fair_order(frozenset()):
        if seq.request.tenant in refuse:
            continue
        queue.remove(seq)
        seq.set_status(Status.RUNNING)
        taken.append(seq.request.request_id)
        if len(taken) == take:
            break
    return taken


def fill(*requests: tuple[int, str, int, str]) -> tuple[WaitingQueue, VirtualTokenCounters]:
    """A queue of (request id, tenant, priority, adapter)."""
    counters = VirtualTokenCounters()
    queue = WaitingQueue(counters)
    for number, tenant, priority, adapter in requests:
        request = make_request(request_id=number, tenant=tenant, priority=priority, adapter=adapter)
        queue.push(Sequence(request, 0, number))
    return queue, counters


def test_within_a_tenant_priority_then_arrival_across_adapters() -> None:
    queue, _ = fill((1, "t", 0, "a"), (2, "t", -1, "b"), (3, "t", 0, ""), (4, "t", 5, "a"), (5, "t", 0, "a"))
    assert propose(queue, 5) == [2, 1, 3, 5, 4]
    assert len(queue) == 0


def test_the_least_served_tenant_is_proposed_first() -> None:
    queue, counters = fill((1, "x", 0, ""), (2, "x", 0, ""), (3, "y", 0, ""))
    counters.charge_input("x", 10)
    assert propose(queue, 3) == [3, 1, 2]


def test_a_lane_that_is_left_does_not_keep_the_others_waiting() -> None:
    queue, counters = fill((1, "x", 0, "cold"), (2, "x", 0, "cold"), (3, "x", 0, ""), (4, "y", 0, ""))
    counters.charge_input("y", 10)
    proposed: list[int] = []
    for seq in queue.fair_order(frozenset()):
        proposed.append(seq.request.request_id)
        if seq.request.adapter_digest:
            continue
        queue.remove(seq)
        seq.set_status(Status.RUNNING)
    assert proposed == [1, 3, 4]
    assert [seq.request.request_id for seq in queue] == [1, 2]


def served(engine: Engine, tenant: str) -> float:
    """Unweighted service of a tenant: what the clients saw, priced as the paper does."""
    mine = [key for key in engine.tokens if str(key[0]) == tenant]
    inputs = sum(engine_prompt[key[1]] for key in engine.started if str(key[0]) == tenant)
    return inputs + 2.0 * sum(len(engine.tokens[key]) for key in mine)


engine_prompt: dict[int, int] = {}


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
def test_two_backlogged_tenants_stay_within_the_bound(weights: tuple[float, float]) -> None:
    """Tenants with very different requests, always backlogged: the gap is bounded, and does not grow."""
    engine = make_engine(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=32)
    rng = random.Random(7)
    number = 0
    longest_input, pool_tokens = 120, 24 * 16
    bound = 2 * max(longest_input, 2 * pool_tokens) / min(weights)
    gap = 0.0
    for _ in range(3000):
        for tenant, weight in zip(("small", "large"), weights, strict=True):
            while sum(seq.request.tenant == tenant for seq in engine.scheduler._waiting) < 3:
                number += 1
                size = rng.randint(60, 120) if tenant == "large" else rng.randint(5, 20)
                engine_prompt[number] = size
                engine.scheduler.add(
                    make_request(
                        [rng.randrange(1000) for _ in range(size)],
                        link=tenant,
                        tenant=tenant,
                        request_id=number,
                        weight=weight,
                        max_tokens=rng.randint(1, 30),
                    )
                )
        engine.step()
        small, large = (
            served(engine, name) / weight for name, weight in zip(("small", "large"), weights, strict=True)
        )
        gap = max(gap, abs(small - large))
    assert small > 5 * bound, "the test ran too short to say anything"
    assert gap <= bound
    engine.close()


def test_a_flood_does_not_delay_another_tenant() -> None:
    engine = make_engine(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32)
    for number in range(200):
        engine.scheduler.add(make_request(40, request_id=number, tenant="flood", max_tokens=10))
    for _ in range(50):
        engine.step()
    engine.scheduler.add(make_request(10, link="victim", tenant="victim", max_tokens=2))
    steps = 0
    while ("victim", 1) not in engine.started:
        engine.step()
        steps += 1
    assert steps <= 12, "at most until the next running sequence ends"
    engine.close()


def test_cached_and_recomputed_prompts_are_not_charged() -> None:
    engine = make_engine(num_blocks=64)
    scheduler = engine.scheduler
    scheduler.add(make_request(48, request_id=1, max_tokens=1))
    engine.run()
    assert scheduler._counters.account("tenant").served == 48 + 2
    scheduler.add(make_request(48, request_id=2, max_tokens=1))
    engine.run()
    assert scheduler._counters.account("tenant").served == 50 + 16 + 2, "two of three blocks were cached"
    engine.close()


def test_a_preemption_is_not_charged_to_its_victim() -> None:
    engine = make_engine(num_blocks=8, enable_prefix_caching=False)
    for number in range(3):
        engine.scheduler.add(make_request(30, request_id=number, max_tokens=40))
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler._counters.account("tenant").served == 3 * (30 + 2 * 40)
    engine.close()


def test_a_step_asks_about_few_of_thousands_of_adapters_that_wait() -> None:
    """A queue of 3,000 adapters, of two tenants, none of which can be read; behind it, one without."""
    engine = make_engine(num_pages=4, max_num_waiting=10_000, num_blocks=200)
    released = hold_reads(engine)
    for number in range(3000):
        tenant = f"tenant-{number % 2}"
        engine.scheduler.add(make_request(5, request_id=number, tenant=tenant, adapter=f"cold-{number}"))
    asked: list[bytes] = []
    is_open = engine.gate.is_open

    def counted(digest: bytes, *arguments: Any, **options: Any) -> bool:
        asked.append(digest)
        return is_open(digest, *arguments, **options)

    engine.gate.is_open = counted  # type: ignore[method-assign]
    engine.step()
    assert 0 < len(asked) <= 2 * MOST_AWAY + LEAST_AWAY + 1, "for a newcomer, and for admission"
    assert len(engine.gate._bills._payer) <= MOST_AWAY + LEAST_AWAY + MAX_LOADS
    engine.scheduler.add(make_request(5, request_id=5000, tenant="tenant-0"))
    engine.step()
    assert ("link", 5000) in engine.started, "who needs nothing is found behind all of them"
    released.set()
    engine.close()


def test_adapters_that_never_come_keep_no_other_tenant_from_its_own() -> None:
    """One tenant was served less, and waits for many adapters that cannot be read; another's was here."""
    engine = make_engine(num_pages=1, num_blocks=200)
    for name in ("warm", "other"):
        engine.store.add(name)
        engine.scheduler.add(make_request(request_id=len(name), tenant="second", adapter=name))
        engine.run()
    assert engine.pages.resident(digest_of("warm")) is None, "it is in host memory alone"
    released = hold_reads(engine)
    for number in range(MOST_AWAY + MAX_LOADS):
        request = make_request(request_id=100 + number, tenant="first", adapter=f"cold-{number}")
        engine.scheduler.add(request)
    engine.scheduler.add(make_request(request_id=99, tenant="second", adapter="warm"))
    assert step_until(engine, 99, most=20)
    released.set()
    engine.close()


@pytest.mark.parametrize("num_pages", [1, 4])
def test_all_of_many_adapters_have_their_turn(num_pages: int) -> None:
    engine = make_engine(num_pages=num_pages, num_blocks=200)
    count = 3 * MOST_AWAY
    for number in range(count):
        engine.store.add(f"cold-{number}", 16)
        engine.scheduler.add(make_request(5, request_id=number, adapter=f"cold-{number}", max_tokens=2))
    engine.run()
    assert len(engine.finished) == count
    engine.check_all_free()
    engine.close()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 2), st.booleans()), max_size=60))
def test_the_order_within_a_tenant_is_that_of_all_its_lanes(
    events: list[tuple[int, int, bool]],
) -> None:
    """Sequences come and go, over a few adapters; what is proposed is what sorting all of them would say."""
    queue = WaitingQueue(VirtualTokenCounters())
    waiting: list[Sequence] = []
    for number, (adapter, priority, leaves) in enumerate(events):
        if leaves and waiting:
            queue.remove(waiting.pop(adapter % len(waiting)))
        else:
            request = make_request(request_id=number, priority=priority, adapter=f"adapter-{adapter}")
            waiting.append(Sequence(request, 0, number))
            queue.push(waiting[-1])
    expected = [seq.request.request_id for seq in sorted(waiting, key=lambda seq: seq.order)]
    assert propose(queue, len(waiting)) == expected
    assert queue.num_tokens_of(len(waiting)) == 0
