"""Steps planned while the one before is under way: the same answers, and nothing told that should not be.

`builders.FakeRunner` computes a step as late as it can, and refuses a row whose blocks hold anything but its
own prefix by then. So whoever takes a freed block before the steps that still use it have passed is found.
"""

from __future__ import annotations

import pytest
from builders import Engine, expected_output, make_engine, make_request

from engine.sequence import Request
from engine.step import UNSEEN


def first_stop(prompt: list[int], at: int) -> int:
    """The token that the fake model draws as its ``at``-th for a prompt."""
    return expected_output(make_request(prompt, max_tokens=at))[-1]


def test_a_decode_row_is_planned_before_its_token_is_known() -> None:
    engine = make_engine(depth=1)
    engine.scheduler.add(make_request(20, max_tokens=4))
    assert engine.step().rows[0].tokens == list(range(7, 27))
    assert [list(engine.step().rows[0].tokens) for _ in range(3)] == [[UNSEEN]] * 3
    assert len(engine.tokens["link", 1, 0]) == 3, "read one step late"
    assert engine.step().rows == (), "no step for a token beyond the last"
    assert engine.finished["link", 1, 0][0] == "LENGTH"
    engine.check_all_free()
    engine.close()


def test_what_is_drawn_after_the_end_token_is_told_nobody() -> None:
    engine = make_engine(depth=1)
    prompt = [3] * 20
    stopping = make_request(prompt, max_tokens=30, stop=[first_stop(prompt, 5)])
    engine.scheduler.add(stopping)
    engine.run()
    assert engine.finished["link", 1, 0][0] == "STOP"
    assert engine.tokens["link", 1, 0] == expected_output(stopping)
    assert engine.runner.num_steps == 6, "one for nothing"
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("caching", [False, True])
def test_blocks_freed_under_a_step_go_to_others_at_once(caching: bool) -> None:
    """The pool holds one at a time, so the second gets the blocks that a row of the first still uses."""
    engine = make_engine(num_blocks=3, max_num_seqs=2, enable_prefix_caching=caching, depth=1)
    prompt = [5] * 30
    first = make_request(prompt, request_id=1, max_tokens=18, stop=[first_stop(prompt, 4)])
    second = make_request([6] * 33, request_id=2, max_tokens=10)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    while ("link", 1, 0) not in engine.finished:
        engine.step()
    assert len(engine.under_way) == 1, "the row of the first that nobody needs"
    ended_in = {block for row in engine.under_way[0][0].rows for block in row.block_ids}
    plan = engine.step()
    assert [row.seq_id for row in plan.rows] == [2]
    assert ended_in & set(plan.rows[0].block_ids), "taken before that row has been computed"
    engine.run()
    assert engine.tokens["link", 1, 0] == expected_output(first)
    assert engine.tokens["link", 2, 0] == expected_output(second)
    engine.check_all_free()
    engine.close()


def test_the_fake_device_would_find_a_block_that_is_taken_too_soon() -> None:
    engine = make_engine(num_blocks=3, max_num_seqs=2, enable_prefix_caching=False, depth=1)
    prompt = [5] * 30
    engine.scheduler.add(make_request(prompt, request_id=1, max_tokens=18, stop=[first_stop(prompt, 4)]))
    engine.scheduler.add(make_request([6] * 33, request_id=2, max_tokens=10))
    while ("link", 1, 0) not in engine.finished:
        engine.step()
    plan = engine.scheduler.schedule()
    engine.runner.submit(plan)
    engine.runner.queue.rotate()  # the device does the second step first
    with pytest.raises((AssertionError, KeyError)):
        engine.take_in()
    engine.close()


@pytest.mark.parametrize("how", ["abort", "disconnect"])
def test_who_leaves_while_its_step_is_under_way_disturbs_nobody(how: str) -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=3, depth=1)
    others = [make_request([n] * 20, link="stays", request_id=n, max_tokens=20) for n in (1, 2)]
    for request in others:
        engine.scheduler.add(request)
    engine.scheduler.add(make_request([9] * 20, request_id=9, max_tokens=50))
    for _ in range(4):
        engine.step()
    told = len(engine.tokens["link", 9, 0])
    if how == "abort":
        engine.scheduler.abort("link", 9)
    else:
        engine.scheduler.abort_link("link")
    engine.scheduler.add(make_request([8] * 40, link="stays", request_id=8, max_tokens=5))
    engine.run()
    assert len(engine.tokens["link", 9, 0]) == told
    for request in others:
        assert engine.tokens["stays", request.request_id, 0] == expected_output(request)
    engine.check_all_free()
    engine.close()


def preempt_under_way(engine: Engine) -> int:
    """Steps until a sequence is preempted whose token is under way; returns its id."""
    while True:
        before = {row.seq_id for plan, _ in engine.under_way for row in plan.rows if row.sampling}
        preempted = engine.scheduler.num_preemptions
        plan = engine.step()
        gone = before - {row.seq_id for row in plan.rows}
        if engine.scheduler.num_preemptions > preempted and gone:
            return max(gone)


def test_a_preempted_sequence_still_gets_the_token_under_way() -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=4, depth=1)
    requests = [make_request([n] * 16, request_id=n, max_tokens=40) for n in range(1, 5)]
    for request in requests:
        engine.scheduler.add(request)
    preempt_under_way(engine)
    engine.run()
    for request in requests:
        assert engine.tokens["link", request.request_id, 0] == expected_output(request)
    engine.check_all_free()
    engine.close()


def preempt_at_its_prompts_end(engine: Engine, request: Request) -> None:
    """Preempts a request of 32 tokens while the step that draws its first is under way."""
    engine.scheduler.add(make_request([1] * 30, request_id=1, max_tokens=10))
    engine.step()
    engine.scheduler.add(request)
    while not engine.scheduler.num_preemptions:
        engine.step()
        assert engine.scheduler.num_running, "it was never preempted"
        assert engine.under_way, "its row is under way"


def test_choices_wait_with_a_first_that_is_preempted() -> None:
    engine = make_engine(num_blocks=4, max_num_batched_tokens=32, depth=1)
    request = make_request([2] * 32, request_id=2, n=2, max_tokens=10)
    preempt_at_its_prompts_end(engine, request)
    assert len(engine.tokens["link", 2, 0]) == 1 and ("link", 2, 1) not in engine.tokens
    engine.run()
    for choice in range(2):
        assert engine.tokens["link", 2, choice] == expected_output(request, choice)
    engine.check_all_free()
    engine.close()


def test_what_a_preempted_spoilt_prompt_has_published_is_found_no_more() -> None:
    engine = make_engine(num_blocks=4, max_num_batched_tokens=32, depth=1)
    engine.store.add("poison", poison=True)
    engine.scheduler.add(make_request(5, request_id=9, adapter="poison"))
    engine.run()
    preempt_at_its_prompts_end(engine, make_request([2] * 32, request_id=2, adapter="poison"))
    assert engine.finished["link", 2, 0][0] == "ERROR"
    engine.run()
    engine.scheduler.add(make_request([2] * 32, request_id=3, adapter="poison"))
    engine.run()
    assert engine.started["link", 3] == 0
    engine.close()


@pytest.mark.parametrize("prompt", [15, 16, 17])
@pytest.mark.parametrize("num_blocks", [5, 40])
def test_choices_part_though_the_first_is_a_step_ahead(prompt: int, num_blocks: int) -> None:
    engine = make_engine(num_blocks=num_blocks, depth=1)
    request = make_request(prompt, n=4, max_tokens=20)
    engine.scheduler.add(request)
    engine.run()
    for choice in range(4):
        assert engine.tokens["link", 1, choice] == expected_output(request, choice)
    engine.check_all_free()
    engine.close()


def test_a_spoilt_row_ends_its_request_though_the_next_is_under_way() -> None:
    engine = make_engine(depth=1)
    engine.store.add("poison", poison=True)
    good = make_request(40, request_id=1, max_tokens=20)
    engine.scheduler.add(good)
    engine.scheduler.add(make_request(40, request_id=2, adapter="poison", n=2))
    engine.run()
    assert {engine.finished["link", 2, choice][0] for choice in (0, 1)} == {"ERROR"}
    assert ("link", 2, 0) not in engine.tokens
    assert engine.tokens["link", 1, 0] == expected_output(good)
    engine.check_all_free()
    engine.close()


def test_tokens_are_banned_by_their_number_before_they_are_known() -> None:
    engine = make_engine(depth=1)
    prompt = [4] * 20
    for number, min_tokens in enumerate((3, 4)):
        request = make_request(
            prompt, request_id=number, max_tokens=12, stop=[first_stop(prompt, 4)], min_tokens=min_tokens
        )
        engine.scheduler.add(request)
        engine.run()
        assert engine.tokens["link", number, 0] == expected_output(request)
        assert (len(engine.tokens["link", number, 0]) == 4) == (min_tokens == 3)
    engine.close()
