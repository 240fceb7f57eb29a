"""Adapters that take turns in too little room: who yields, when, and to whom."""

from __future__ import annotations

import pytest
from builders import Engine, digest_of, expected_output, make_engine, make_request
from virtual_engine import VirtualEngine

from engine.scheduler.claims import GRACE_STEPS
from engine.scheduler.turns import LEAST_TURN
from engine.step import StepPlan

SLACK = 6
"""Steps that a swap takes besides the turn: the load, the claim, the placing, the admission."""


def steps_until_started(engine: Engine, *numbers: int, most: int = 3000) -> dict[int, int]:
    """Steps until these requests have started; returns after how many steps each had."""
    started: dict[int, int] = {}
    for count in range(1, most):
        if not engine.step().rows:
            engine.wait_for_loads()
        started |= {n: count for n in numbers if ("link", n) in engine.started and n not in started}
        if len(started) == len(numbers):
            return started
    raise AssertionError(f"only {sorted(started)} started")


def bring(engine: Engine, *names: str) -> None:
    """Has adapters in host memory, so that steps need not wait for threads."""
    for name in names:
        engine.tiers.want(engine.store.add(name, 16))
        while engine.tiers.is_loading:
            engine.wait_for_loads()
            engine.tiers.poll()


def test_a_long_answer_yields_after_its_turn_and_goes_on_later() -> None:
    engine = make_engine(num_pages=1, num_blocks=200)
    bring(engine, "a", "b")
    requests = {1: make_request(5, request_id=1, adapter="a", max_tokens=400)}
    engine.scheduler.add(requests[1])
    steps_until_started(engine, 1)
    requests[2] = make_request(5, request_id=2, adapter="b", max_tokens=400)
    engine.scheduler.add(requests[2])
    assert steps_until_started(engine, 2)[2] <= LEAST_TURN + SLACK
    assert len(engine.tokens["link", 1, 0]) >= LEAST_TURN
    steps = engine.run()
    for number, request in requests.items():
        assert engine.tokens["link", number, 0] == expected_output(request)
    yields = engine.tiers.counters.yields
    assert 10 <= yields <= 2 * 400 // LEAST_TURN, "turns are taken to the end, and are long enough"
    assert steps <= 800 + (SLACK + 2) * yields
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_many_adapters_in_little_room_all_start_soon_and_none_is_left_out(depth: int) -> None:
    engine = make_engine(num_pages=2, num_blocks=400, max_num_seqs=16, depth=depth)
    names = [f"adapter-{number}" for number in range(8)]
    bring(engine, *names)
    requests = [
        make_request(
            5 + number, request_id=number, adapter=names[number % 8], max_tokens=150, n=1 + number % 2
        )
        for number in range(16)
    ]
    for request in requests:
        engine.scheduler.add(request)
    started = steps_until_started(engine, *range(16))
    # Two pages for eight adapters: the last one's first turn comes after three of the others'.
    assert max(started.values()) <= 4 * (LEAST_TURN + 2 * SLACK)
    engine.run()
    for request in requests:
        for choice in range(len(request.sampling)):
            assert engine.tokens["link", request.request_id, choice] == expected_output(request, choice)
    engine.check_all_free()
    engine.close()


def test_who_has_been_served_less_does_not_yield() -> None:
    engine = make_engine(num_pages=1, num_blocks=400)
    bring(engine, "mine", "cold")
    engine.scheduler.add(make_request(5, request_id=1, adapter="mine", tenant="small", max_tokens=200))
    engine.scheduler.add(make_request(5, request_id=2, tenant="large", max_tokens=600))
    engine.scheduler.add(make_request(5, request_id=3, tenant="large", max_tokens=600))
    steps_until_started(engine, 1, 2, 3)
    engine.scheduler.add(make_request(5, request_id=4, adapter="cold", tenant="large", max_tokens=10))
    while ("link", 1, 0) not in engine.finished:
        engine.step()
    assert ("link", 4) not in engine.started and engine.tiers.counters.yields == 0
    assert steps_until_started(engine, 4)[4] <= SLACK
    engine.close()


def test_a_claim_does_not_make_the_adapters_of_others_wait_longer_than_a_turn() -> None:
    engine = make_engine(num_pages=2, num_blocks=400, max_num_seqs=16)
    bring(engine, "a", "b", "c")
    for number, name in enumerate("ab"):
        engine.scheduler.add(make_request(5, request_id=number, adapter=name, max_tokens=1000))
    steps_until_started(engine, 0, 1)
    engine.scheduler.add(make_request(5, request_id=2, adapter="c", max_tokens=1000))
    engine.scheduler.add(make_request(5, request_id=3, adapter="a", max_tokens=5))
    engine.scheduler.add(make_request(5, request_id=4, adapter="b", max_tokens=5))
    assert max(steps_until_started(engine, 2, 3, 4).values()) <= 2 * (LEAST_TURN + SLACK)
    engine.close()


def test_without_a_prefix_cache_short_answers_are_not_computed_again() -> None:
    engine = make_engine(num_pages=1, num_blocks=200, enable_prefix_caching=False)
    bring(engine, "a", "b")
    engine.scheduler.add(make_request(100, request_id=1, adapter="a", max_tokens=200))
    steps_until_started(engine, 1)
    engine.scheduler.add(make_request(5, request_id=2, adapter="b", max_tokens=5))
    engine.run()
    assert engine.tiers.counters.yields == 0
    engine.close()


def test_a_long_context_has_a_longer_turn() -> None:
    engine = make_engine(num_pages=1, num_blocks=400, max_num_batched_tokens=512)
    bring(engine, "a", "b")
    engine.scheduler.add(make_request(2000, request_id=1, adapter="a", max_tokens=400))
    steps_until_started(engine, 1)
    engine.scheduler.add(make_request(5, request_id=2, adapter="b", max_tokens=5))
    steps_until_started(engine, 2)
    assert 2000 // 16 <= len(engine.tokens["link", 1, 0]) <= 2400 // 16 + SLACK
    engine.close()


def test_who_yields_goes_behind_those_who_wait_already() -> None:
    engine = make_engine(num_pages=1, num_blocks=400)
    bring(engine, "a", "b", "c")
    for number, name in enumerate("ab"):
        engine.scheduler.add(make_request(5, request_id=number, adapter=name, max_tokens=1000))
    steps_until_started(engine, 0, 1)
    engine.scheduler.add(make_request(5, request_id=2, adapter="c", max_tokens=1000))
    assert steps_until_started(engine, 2)[2] <= 2 * (LEAST_TURN + SLACK), "two older ones do not keep it out"
    engine.close()


def test_a_pinned_adapter_in_use_is_nobodys_victim() -> None:
    engine = make_engine(num_pages=4, num_blocks=400)
    bring(engine, "pinned", "cold")
    engine.gate.pin(frozenset({digest_of("pinned")}))
    engine.scheduler.add(make_request(5, request_id=1, adapter="pinned", max_tokens=500))
    steps_until_started(engine, 1)
    engine.store.add("wide", 48)
    engine.scheduler.add(make_request(5, request_id=2, adapter="wide", max_tokens=500))
    steps_until_started(engine, 2)
    engine.scheduler.add(make_request(5, request_id=3, adapter="cold", max_tokens=5))
    assert steps_until_started(engine, 3)[3] <= LEAST_TURN + SLACK
    assert engine.pages.references(digest_of("pinned")) == 1 and engine.tiers.counters.yields == 1
    engine.close()


def test_a_claim_finds_victims_among_those_that_begin_to_run_after_it_was_made() -> None:
    """The only page is kept for a sequence that lacks a seat, so that at first nobody can be named."""
    engine = make_engine(num_pages=1, num_blocks=400, max_num_seqs=2)
    bring(engine, "first", "kept", "late")
    engine.scheduler.add(make_request(5, request_id=1, adapter="first", tenant="a", max_tokens=900))
    engine.scheduler.add(make_request(5, request_id=2, tenant="a", max_tokens=900))
    steps_until_started(engine, 1, 2)
    engine.scheduler.add(make_request(5, request_id=3, adapter="kept", tenant="a", max_tokens=900))
    while engine.gate.claim is None:
        engine.step()
    engine.scheduler.add(make_request(5, request_id=4, tenant="a", max_tokens=50, priority=-1))
    steps_until_started(engine, 4)
    assert ("link", 3) not in engine.started
    engine.scheduler.add(make_request(5, request_id=5, adapter="late", tenant="c", max_tokens=5))
    steps_until_started(engine, 3)
    assert ("link", 5) not in engine.started, "the page was kept for the one before it"
    assert steps_until_started(engine, 5)[5] <= LEAST_TURN + SLACK
    engine.close()


def test_what_a_deep_queue_has_computed_is_not_lost_to_turns() -> None:
    """Sixteen adapters in room for eight, and far more requests than the cache holds contexts."""
    engine = VirtualEngine(num_pages=8, num_blocks=400)
    computed = 0

    def count(plan: StepPlan) -> None:
        nonlocal computed
        computed += sum(len(row.tokens) for row in plan.rows)

    engine.after_step = count
    for number in range(120):
        engine.store.add(f"adapter-{number % 16}", 16)
        request = make_request(
            [number] * 128, request_id=number, adapter=f"adapter-{number % 16}", max_tokens=160
        )
        engine.send(request, 0.0)
    engine.run()
    assert all(life.num_tokens == 160 for life in engine.lives.values())
    assert engine.tiers.counters.yields > 0
    assert computed <= 1.1 * 120 * (128 + 160)


def test_a_crowded_cache_lengthens_no_turn_for_a_tenant_of_which_nothing_runs() -> None:
    engine = make_engine(num_pages=1, num_blocks=400)
    bring(engine, "a", "b", "c")
    engine.scheduler._room._turns._is_crowded = lambda: True
    engine.scheduler.add(make_request(60, request_id=0, adapter="a", max_tokens=1000))
    steps_until_started(engine, 0)
    engine.scheduler.add(make_request(5, request_id=1, adapter="b", max_tokens=2))
    for _ in range(2 * LEAST_TURN):
        engine.step()
    assert ("link", 1) not in engine.started, "its own tenant's answer would be computed again"
    engine.scheduler.add(make_request(5, request_id=2, adapter="c", tenant="new", max_tokens=2))
    assert steps_until_started(engine, 2)[2] <= SLACK, "and the claim that stands gives way"
    assert ("link", 1) not in engine.started
    engine.close()


def test_a_claim_of_a_tenant_that_runs_gives_way_to_one_of_which_nothing_runs() -> None:
    """Both pages are in use, by answers whose turns have begun just now, and a third adapter claims one."""
    engine = make_engine(num_pages=2, num_blocks=400, max_num_seqs=8)
    bring(engine, "a", "b", "c", "new")
    for number, name in enumerate("abc"):
        engine.scheduler.add(make_request(5, request_id=number, adapter=name, max_tokens=1000))
    steps_until_started(engine, 0, 1)
    engine.step()
    assert engine.gate.claim is not None and engine.gate.claim[0] == digest_of("c")
    engine.scheduler.add(make_request([1] * 5, request_id=3, adapter="new", tenant="new", max_tokens=2))
    assert steps_until_started(engine, 3) == {3: 1}
    assert steps_until_started(engine, 2)[2] <= LEAST_TURN + SLACK, "the other claims again"
    engine.run()
    engine.check_all_free()
    engine.close()


def test_a_claim_takes_an_adapter_that_is_free_soon_before_one_that_has_to_yield() -> None:
    engine = make_engine(num_pages=2, num_blocks=400)
    bring(engine, "long", "short", "next")
    engine.scheduler.add(make_request(5, request_id=0, adapter="long", max_tokens=1000))
    steps_until_started(engine, 0)
    for _ in range(2 * LEAST_TURN):
        engine.step()
    engine.scheduler.add(make_request(5, request_id=1, adapter="short", max_tokens=10))
    steps_until_started(engine, 1)
    engine.scheduler.add(make_request([1] * 5, request_id=2, adapter="next", max_tokens=5))
    assert steps_until_started(engine, 2)[2] <= 10 + SLACK
    assert engine.tiers.counters.yields == 0 and ("link", 0, 0) not in engine.finished
    engine.close()


def test_a_victims_sequences_start_beside_the_one_that_the_claim_waits_for_anyway() -> None:
    """Eight requests for two adapters in room for one: those of an adapter run together, not one by one."""
    engine = make_engine(num_pages=1, num_blocks=400, max_num_seqs=8, enable_prefix_caching=False)
    bring(engine, "a", "b")
    requests = [
        make_request([number] * 40, request_id=number, adapter="ab"[number in (1, 5, 6, 7)], max_tokens=60)
        for number in range(8)
    ]
    for request in requests:
        engine.scheduler.add(request)
    steps = engine.run()
    for request in requests:
        assert engine.tokens["link", request.request_id, 0] == expected_output(request)
    assert steps <= 2 * (60 + GRACE_STEPS + SLACK)
    engine.check_all_free()
    engine.close()


def test_a_claim_is_not_put_off_by_short_requests_that_keep_coming() -> None:
    engine = make_engine(num_pages=1, num_blocks=400, max_num_seqs=8)
    bring(engine, "a", "b")
    engine.scheduler.add(make_request(5, request_id=0, adapter="a", max_tokens=1000))
    engine.step()
    engine.scheduler.add(make_request(5, request_id=1, adapter="b", max_tokens=5))
    for steps in range(LEAST_TURN + GRACE_STEPS + SLACK):
        engine.scheduler.add(make_request([steps] * 5, request_id=10 + steps, adapter="a", max_tokens=6))
        engine.step()
    assert ("link", 1) in engine.started
    assert ("link", 10) in engine.started, "while there was time, it went on"
    engine.close()
