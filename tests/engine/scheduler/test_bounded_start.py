"""Nobody waits without end: after how many steps a request starts that others stand in the way of.

The bound, from when its adapter is in host memory: ``ceil(P / b) + max(32, C / 16) + 3`` steps, and
`GRACE_STEPS` more where requests keep coming that end soon (tried in `test_turns`). ``P`` are the tokens of
the prompts that the victims have yet to compute, ``b`` is what a step has for prompts, and ``C`` the longest
context of a victim. Three steps more are for the claim, the copy, and a step under way.
"""

from __future__ import annotations

import math

import pytest
from builders import Engine, expected_output, hold_reads, make_engine, make_request

from engine.scheduler.turns import LEAST_TURN, TOKENS_PER_CACHED


def bring(engine: Engine, *names: str) -> None:
    """Has adapters in host memory, so that steps need not wait for threads."""
    for name in names:
        engine.tiers.want(engine.store.add(name, 16))
        while engine.tiers.is_loading:
            engine.wait_for_loads()
            engine.tiers.poll()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prompt", [5, 800])
@pytest.mark.parametrize("tenants", [("one", "one"), ("a", "b")])
def test_one_adapter_that_never_runs_out_of_requests_lets_another_start(
    tenants: tuple[str, str], prompt: int, depth: int
) -> None:
    """Room for one adapter; the queue is A, B, A, A, A, …, and A's come faster than they are answered."""
    engine = make_engine(num_pages=1, num_blocks=800, max_num_seqs=4, max_num_batched_tokens=64, depth=depth)
    bring(engine, "a", "b")
    first, second = tenants
    engine.scheduler.add(make_request(prompt, request_id=0, adapter="a", tenant=first, max_tokens=2000))
    engine.step()
    engine.scheduler.add(make_request(5, link="b", request_id=1, adapter="b", tenant=second, max_tokens=9))
    step_prompts = 64 if first == second else 16
    num_prompts = math.ceil(prompt / step_prompts)
    bound = num_prompts + max(LEAST_TURN, int((prompt + LEAST_TURN) * TOKENS_PER_CACHED)) + 3
    steps = 0
    while ("b", 1) not in engine.started:
        steps += 1
        assert steps <= bound
        engine.scheduler.add(
            make_request(prompt, request_id=1 + steps, adapter="a", tenant=first, max_tokens=2000)
        )
        engine.step()
    assert len(engine.tokens["link", 0, 0]) >= LEAST_TURN, "it had its turn"
    engine.scheduler.abort_link("link")
    engine.run()
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("seats", "num_blocks"), [(4, 100), (8, 16)])
def test_who_has_nothing_running_starts_in_the_next_step(seats: int, num_blocks: int, depth: int) -> None:
    """All seats, or all blocks, are those of one tenant, whose answers have just begun."""
    engine = make_engine(num_blocks=num_blocks, max_num_seqs=seats, max_num_batched_tokens=256, depth=depth)
    for number in range(20):
        engine.scheduler.add(make_request([number] * 40, request_id=number, tenant="flood", max_tokens=100))
    for _ in range(6):
        engine.step()
    num_running, preemptions = engine.scheduler.num_running, engine.scheduler.num_preemptions
    engine.scheduler.add(make_request(20, link="new", request_id=1, tenant="new", max_tokens=3))
    engine.step()
    assert ("new", 1) in engine.started
    assert engine.scheduler.num_running >= num_running - 1, "no more of them yield than it takes"
    assert engine.scheduler.figures()["seat_yields"] >= 1
    assert engine.scheduler.num_preemptions == preemptions
    while ("new", 1, 0) not in engine.finished:
        engine.step()
    engine.scheduler.abort_link("link")
    engine.run()
    engine.check_all_free()
    engine.close()


def test_who_has_nothing_running_does_not_wait_for_an_adapter_that_another_request_of_it_names() -> None:
    engine = make_engine(num_blocks=200, max_num_seqs=2)
    released = hold_reads(engine)
    for number in range(4):
        engine.scheduler.add(make_request([number] * 5, request_id=number, tenant="flood", max_tokens=100))
    engine.step()
    engine.scheduler.add(make_request(5, link="new", request_id=1, adapter="cold", tenant="new"))
    engine.scheduler.add(make_request(5, link="new", request_id=2, tenant="new"))
    engine.step()
    assert ("new", 2) in engine.started and ("new", 1) not in engine.started
    released.set()
    engine.close()


@pytest.mark.parametrize("seats", [1, 2])
def test_the_only_sequence_of_a_tenant_has_its_turn_before_it_gives_up_its_seat(seats: int) -> None:
    """Also where it would be the only one once others of the tenant have given up theirs."""
    engine = make_engine(num_blocks=200, max_num_seqs=seats)
    for number in range(seats):
        engine.scheduler.add(make_request([number] * 5, request_id=number, tenant="long", max_tokens=1000))
    engine.step()
    engine.scheduler.add(make_request(5, link="new", request_id=1, n=seats, tenant="new", max_tokens=1000))
    steps = 0
    while ("new", 1) not in engine.started:
        engine.step()
        steps += 1
    assert LEAST_TURN - 2 <= steps <= LEAST_TURN + 1
    assert engine.scheduler.figures()["seat_yields"] == seats, "nobody yields before that would suffice"
    engine.close()


def test_nobody_yields_blocks_that_would_not_suffice() -> None:
    """Ten blocks are those of two sequences of one tenant, of which one may yield its five."""
    engine = make_engine(num_blocks=10, max_num_batched_tokens=256)
    for number in range(2):
        engine.scheduler.add(make_request([number] * 70, request_id=number, tenant="long", max_tokens=50))
    engine.step()
    engine.scheduler.add(make_request([2] * 90, link="new", request_id=1, tenant="new", max_tokens=2))
    for _ in range(5):
        engine.step()
    assert engine.scheduler.figures()["seat_yields"] == 0
    first = make_request([3] * 80, link="new", request_id=2, tenant="new", max_tokens=2, priority=-1)
    engine.scheduler.add(first)
    engine.step()
    assert ("new", 2) in engine.started and engine.scheduler.figures()["seat_yields"] == 1
    engine.run()
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("waiting", [0, 2])
def test_who_was_served_more_yields_nothing_to_who_was_served_least(waiting: int) -> None:
    """A tenant that has had its share, and has nothing running now, waits as its counter says, whether or not
    others wait before it.
    """
    engine = make_engine(num_blocks=200, max_num_seqs=2)
    engine.scheduler.add(make_request(200, link="greedy", request_id=1, tenant="greedy", max_tokens=300))
    engine.run()
    for number in range(waiting + 2):
        engine.scheduler.add(make_request(5, request_id=number, tenant="modest", max_tokens=60))
    engine.scheduler._counters.account("modest").served = 0.0
    engine.step()
    engine.scheduler.add(make_request(5, link="greedy", request_id=2, tenant="greedy", max_tokens=5))
    for _ in range(40):
        engine.step()
    assert ("greedy", 2) not in engine.started and engine.scheduler.figures()["seat_yields"] == 0
    engine.run()
    engine.close()


def test_a_long_prompt_does_not_stand_before_another_tenant() -> None:
    """A prompt of thirty steps is under way; a short one of a tenant that got less is computed next."""
    engine = make_engine(num_blocks=200, max_num_batched_tokens=64)
    engine.scheduler.add(make_request(30 * 64, request_id=1, tenant="long", max_tokens=5))
    engine.step()
    engine.scheduler.add(make_request([2] * 20, link="short", request_id=1, tenant="short", max_tokens=5))
    plan = engine.step()
    assert ("short", 1) in engine.started and ("short", 1, 0) in engine.tokens
    assert sorted(len(row.tokens) for row in plan.rows) == [20], "with nothing of the long one beside it"
    assert sorted(len(row.tokens) for row in engine.step().rows) == [1, 16], "which then goes on"
    engine.run()
    engine.close()


def test_steps_are_short_while_several_tenants_are_here() -> None:
    engine = make_engine(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=480)
    for number in range(3):
        engine.scheduler.add(make_request(10, request_id=number, tenant="a", max_tokens=200))
    engine.step()
    engine.scheduler.add(make_request([1] * 1000, request_id=9, tenant="a", max_tokens=5))
    assert [len(row.tokens) for row in engine.step().rows] == [1, 1, 1, 477], "one tenant has it all"
    engine.scheduler.add(make_request([2] * 30, link="b", request_id=1, tenant="b", max_tokens=1))
    rows = engine.step().rows
    assert sorted(len(row.tokens) for row in rows) == [1, 1, 1, 30], "its own prompt, and nobody else's"
    sizes = [sorted(len(row.tokens) for row in engine.step().rows) for _ in range(3)]
    assert sizes[0][-1] == 480 // 24, "then, prompts have a part of each step"
    engine.run()
    engine.close()


def test_who_has_made_room_in_vain_comes_back_a_step_later() -> None:
    """A newcomer with an unknown token ends where it would start. A step under way has the other's row."""
    engine = make_engine(num_blocks=100, max_num_seqs=1, depth=1)
    request = make_request(20, request_id=1, tenant="busy", max_tokens=2 * LEAST_TURN)
    engine.scheduler.add(request)
    for _ in range(LEAST_TURN + 4):
        engine.step()
    engine.scheduler.add(make_request(5, link="new", request_id=1, tenant="new", vocab_size=5000))
    engine.step()
    assert engine.scheduler.figures()["seat_yields"] == 1 and ("new", 1, 0) in engine.finished
    assert engine.scheduler.num_running == 0
    engine.run()
    assert engine.tokens["link", 1, 0] == expected_output(request)
    engine.close()
