"""The scheduler step by step: budgets, chunks, sharing, preemption, and every way to end."""

from __future__ import annotations

import pytest
from builders import Engine, expected_output, make_engine, make_request

from engine.scheduler import SchedulerLimits
from engine.sequence import Request
from engine.step import StepPlan


def sizes(plan: StepPlan) -> list[int]:
    return [len(row.tokens) for row in plan.rows]


def assert_right(engine: Engine, *requests: Request) -> None:
    """Every choice got exactly the tokens that the fake model gives it when it runs alone."""
    for request in requests:
        for choice in range(len(request.sampling)):
            key = (request.link, request.request_id, choice)
            assert engine.tokens[key] == expected_output(request, choice), key
            assert engine.finished[key][0] in ("LENGTH", "STOP")


def test_a_step_takes_decodes_first_then_chunks_then_admissions() -> None:
    engine = make_engine(max_num_batched_tokens=32)
    engine.scheduler.add(make_request(10, request_id=1, max_tokens=20))
    assert sizes(engine.step()) == [10]
    engine.scheduler.add(make_request(70, request_id=2))
    engine.scheduler.add(make_request(20, request_id=3, scope="other"))
    plans = [engine.step() for _ in range(4)]
    assert [sizes(plan) for plan in plans] == [[1, 31], [1, 31], [1, 8, 20], [1, 1, 1]]
    assert [[row.sampling is not None for row in plan.rows] for plan in plans] == [
        [True, False],
        [True, False],
        [True, True, True],
        [True, True, True],
    ]
    engine.close()


def test_seats_bound_the_running_sequences() -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=64)
    for number in range(4):
        engine.scheduler.add(make_request(5, request_id=number, max_tokens=3))
    assert sizes(engine.step()) == [5, 5]
    assert engine.scheduler.num_running == 2 and engine.scheduler.num_waiting == 2
    engine.run()
    engine.check_all_free()
    engine.close()


def test_a_budget_below_the_seats_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-num-batched-tokens"):
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=7)


def test_a_shared_prefix_is_computed_once_within_its_scope_and_adapter() -> None:
    engine = make_engine(max_num_batched_tokens=128)
    engine.store.add("a")
    first = make_request(50, request_id=1, adapter="a")
    engine.scheduler.add(first)
    engine.run()
    again = make_request(50, request_id=2, adapter="a")
    elsewhere = make_request(50, request_id=3, adapter="a", scope="other")
    base = make_request(50, request_id=4)
    for request in (again, elsewhere, base):
        engine.scheduler.add(request)
        engine.run()
    assert [engine.started["link", number] for number in (1, 2, 3, 4)] == [0, 48, 0, 0]
    assert_right(engine, first, again, elsewhere, base)
    engine.close()


def test_a_prompt_that_is_cached_whole_still_computes_a_token() -> None:
    engine = make_engine()
    requests = [make_request(48, request_id=number, max_tokens=2) for number in range(2)]
    for request in requests:
        engine.scheduler.add(request)
        engine.run()
    assert engine.started["link", 1] == 32
    assert_right(engine, *requests)
    engine.close()


def test_generated_blocks_are_shared_too() -> None:
    engine = make_engine()
    first = make_request(20, request_id=1, max_tokens=40)
    engine.scheduler.add(first)
    engine.run()
    follow_up = make_request([*first.prompt, *engine.tokens["link", 1, 0], 5], request_id=2)
    engine.scheduler.add(follow_up)
    engine.run()
    assert engine.started["link", 2] == 48
    assert_right(engine, first, follow_up)
    engine.close()


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_the_prompt_and_part_on_writing(prompt: int, caching: bool) -> None:
    engine = make_engine(num_blocks=32, enable_prefix_caching=caching)
    request = make_request(prompt, n=4, max_tokens=20)
    engine.scheduler.add(request)
    engine.step()
    shared = 32 - engine.pool.num_idle
    assert shared == -(-prompt // 16), "four choices hold the blocks of one prompt"
    assert engine.scheduler.num_running == 4
    assert sizes(engine.step()) == [1, 1, 1, 1]
    engine.run()
    assert_right(engine, request)
    engine.check_all_free()
    engine.close()


def test_choices_take_their_seats_together() -> None:
    engine = make_engine(max_num_seqs=4)
    engine.scheduler.add(make_request(5, request_id=1, n=3, max_tokens=4))
    engine.scheduler.add(make_request(5, request_id=2, n=2, max_tokens=4))
    engine.scheduler.add(make_request(5, request_id=3, n=1, max_tokens=4))
    engine.step()
    assert ("link", 1) in engine.started and ("link", 2) not in engine.started
    assert ("link", 3) not in engine.started, "small requests do not overtake a large one"
    engine.run()
    engine.close()


def test_a_short_pool_preempts_the_last_and_the_answers_stay_right() -> None:
    engine = make_engine(num_blocks=10, max_num_seqs=8)
    requests = [make_request([number] * 20, request_id=number, max_tokens=60) for number in range(6)]
    for request in requests:
        engine.scheduler.add(request)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert_right(engine, *requests)
    engine.check_all_free()
    engine.close()


def test_the_first_admitted_is_never_preempted() -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=8)
    first = make_request([1] * 16, request_id=1, max_tokens=80)
    engine.scheduler.add(first)
    engine.step()
    for number in range(2, 6):
        engine.scheduler.add(make_request([number] * 16, request_id=number, max_tokens=30))
    steps = 1
    while ("link", 1, 0) not in engine.finished:
        engine.step()
        steps += 1
    assert steps == 80, "a token in every step, whatever the others do"
    engine.run()
    engine.close()


def test_one_that_fits_alone_finishes_in_the_smallest_pool() -> None:
    engine = make_engine(num_blocks=2)
    request = make_request(30, n=2, max_tokens=2)
    engine.scheduler.add(request)
    engine.run(200)
    assert_right(engine, request)
    engine.check_all_free()
    engine.close()


def test_large_requests_are_not_starved_of_blocks_by_small_ones() -> None:
    engine = make_engine(num_blocks=10, max_num_seqs=4)
    number = 0
    while number < 4:
        engine.scheduler.add(make_request([number] * 16, request_id=number, max_tokens=20))
        number += 1
    engine.step()
    engine.scheduler.add(make_request([99] * 150, request_id=99, max_tokens=2))
    for _ in range(60):
        engine.scheduler.add(make_request([number % 50] * 16, request_id=100 + number, max_tokens=20))
        number += 1
        engine.step()
    assert ("link", 99) in engine.started
    engine.close()


def test_stop_tokens_end_and_are_sent_and_wait_for_min_tokens() -> None:
    plain = expected_output(make_request(20, max_tokens=8))
    stopping = make_request(20, request_id=1, max_tokens=8, stop=[plain[2]])
    patient = make_request(20, request_id=2, max_tokens=8, stop=[plain[2]], min_tokens=5)
    engine = make_engine()
    for request in (stopping, patient):
        engine.scheduler.add(request)
    engine.run()
    assert engine.tokens["link", 1, 0] == plain[:3]
    assert engine.finished["link", 1, 0][0] == "STOP"
    assert plain[2] not in engine.tokens["link", 2, 0][:5]
    assert_right(engine, patient)
    engine.close()


def test_a_request_goes_on_after_tokens_made_elsewhere() -> None:
    whole = make_request(20, request_id=1, max_tokens=30)
    tokens = expected_output(whole)
    rest = make_request(20, request_id=2, max_tokens=30, output=tokens[:13])
    none_left = make_request(20, request_id=3, max_tokens=30, output=tokens)
    engine = make_engine()
    for request in (rest, none_left):
        engine.scheduler.add(request)
    engine.run()
    assert engine.tokens["link", 2, 0] == tokens[13:]
    assert engine.finished["link", 3, 0][0] == "LENGTH" and ("link", 3, 0) not in engine.tokens
    engine.close()


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
@pytest.mark.parametrize("how", ["abort", "disconnect", "deadline"])
@pytest.mark.parametrize("n", [1, 3])
def test_whoever_leaves_frees_everything_within_a_step(when: str, how: str, n: int) -> None:
    now = 0.0
    engine = make_engine(max_num_batched_tokens=16, clock=lambda: now)
    engine.store.add("a")
    deadline = 100.0 if how == "deadline" else None
    engine.scheduler.add(make_request(40, adapter="a", n=n, deadline=deadline, arrival=0.0))
    if when != "waiting":
        while not engine.step().rows:
            engine.wait_for_loads()
    if when == "decode":
        engine.step()
        engine.step()
    used = engine.pool.num_blocks - engine.pool.num_idle
    assert (used > 0) == (when != "waiting")
    if how == "abort":
        engine.scheduler.abort("link", 1)
    elif how == "disconnect":
        engine.scheduler.abort_link("link")
    else:
        now = 100.0
    assert engine.step().rows == ()
    engine.check_all_free()
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    ends = {key[2]: reason for key, (reason, _) in engine.finished.items()}
    reason = {"abort": "ABORTED", "deadline": "DEADLINE"}.get(how)
    assert ends == ({} if reason is None else dict.fromkeys(range(n), reason))
    engine.close()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_aborting_the_first_choice_leaves_the_others_right(steps: int) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    request = make_request(40, n=3, max_tokens=10)
    engine.scheduler.add(request)
    for _ in range(steps):
        engine.step()
    engine.scheduler.abort("link", 1, choice=0)
    engine.run()
    assert engine.finished["link", 1, 0][0] == "ABORTED"
    for choice in (1, 2):
        assert engine.tokens["link", 1, choice] == expected_output(request, choice)
    assert list(engine.started) == [("link", 1)]
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("budget", [14, 15, 16, 17])
def test_who_takes_over_a_prompt_tells_what_is_left_of_its_logprobs(budget: int) -> None:
    """All of it could be found in the prefix cache, from which no logprobs follow."""
    engine = make_engine(max_num_batched_tokens=budget)
    engine.scheduler.add(make_request(40, request_id=1))
    engine.run()
    request = make_request(40, request_id=2, n=2, prompt_logprobs=1)
    engine.scheduler.add(request)
    engine.step()
    assert len(engine.told["link", 2]) == budget
    engine.scheduler.abort("link", 2, choice=0)
    engine.run()
    assert engine.told["link", 2] == request.prompt[1:]
    engine.check_all_free()
    engine.close()


def test_what_is_not_finite_ends_its_own_request_and_is_not_found_again() -> None:
    engine = make_engine()
    engine.store.add("poison", poison=True)
    good = make_request(40, request_id=1, max_tokens=20)
    engine.scheduler.add(good)
    for number in (2, 3):
        engine.scheduler.add(make_request(40, request_id=number, adapter="poison", n=2))
        engine.run()
    for number in (2, 3):
        for choice in (0, 1):
            assert engine.finished["link", number, choice] == ("ERROR", "the logits are not finite")
        assert engine.started["link", number] == 0, "no block of the spoiled prompt was shared"
    assert_right(engine, good)
    engine.check_all_free()
    engine.close()


def test_a_step_that_fails_ends_its_sequences_alone() -> None:
    engine = make_engine(max_num_seqs=2)
    for number in range(3):
        engine.scheduler.add(make_request(20, request_id=number, max_tokens=5))
    plan = engine.scheduler.schedule()
    engine.scheduler.fail(plan, "it broke")
    engine.collect()
    engine.scheduler.check()
    assert {key[1]: end for key, end in engine.finished.items()} == dict.fromkeys(
        (0, 1), ("ERROR", "it broke")
    )
    engine.run()
    assert engine.finished["link", 2, 0][0] == "LENGTH"
    assert engine.started["link", 2] == 0, "what the failed step wrote is not trusted"
    engine.close()


def test_a_full_queue_refuses() -> None:
    engine = make_engine(max_num_waiting=3)
    engine.scheduler.add(make_request(request_id=1, n=2))
    engine.scheduler.add(make_request(request_id=2, n=2, tenant="other"))
    engine.collect()
    assert {engine.finished["link", 2, choice][0] for choice in (0, 1)} == {"REFUSED"}
    assert "2 sequences are waiting" in engine.finished["link", 2, 0][1]
    engine.close()


def test_one_tenant_cannot_fill_the_queue_for_the_others() -> None:
    engine = make_engine(max_num_waiting=12, max_num_seqs=2)
    for number in range(20):
        engine.scheduler.add(make_request(request_id=number, tenant="flood"))
        if number == 1:
            engine.step()
    engine.collect()
    assert len(engine.finished) == 12, "its own that run do not count"
    assert engine.scheduler.num_running == 2 and engine.scheduler.num_waiting == 6
    assert "6 sequences of yours are waiting" in engine.finished["link", 19, 0][1]
    engine.scheduler.add(make_request(request_id=20, tenant="other", n=2))
    engine.collect()
    assert ("link", 20, 0) not in engine.finished
    engine.run()
    engine.check_all_free()
    engine.close()


def test_cached_tokens_of_a_continued_request_are_those_of_its_prompt() -> None:
    engine = make_engine()
    whole = make_request(20, request_id=1, max_tokens=40)
    engine.scheduler.add(whole)
    engine.run()
    engine.scheduler.add(make_request(20, request_id=2, max_tokens=40, output=expected_output(whole)[:35]))
    engine.run()
    assert engine.started["link", 2] == 20, "all of the prompt, though 48 tokens were found"
    engine.close()
