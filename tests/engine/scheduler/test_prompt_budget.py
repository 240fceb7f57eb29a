"""How many prompt tokens a step has: their part of the work, and others' patience, which is measured."""

from __future__ import annotations

import random
import threading
import time

import pytest
from builders import Engine, make_engine, make_request
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BLOCK_SIZE
from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from engine.scheduler.prompt_budget import (
    FEW,
    LENGTHENING,
    PATIENCE_S,
    PROMPTS_LENGTHENING,
    WINDOW,
    PromptBudget,
)
from engine.step import StepPlan

MOST = 2048


def beside_decodes(budget: PromptBudget, available: int, *, decodes: int = 8, is_shared: bool = False) -> int:
    return budget.of_step(decodes, available, most_decode=True, is_shared=is_shared)


@given(
    decodes=st.integers(0, 256),
    available=st.integers(0, 100_000),
    spread=st.integers(0, 512),
    most_decode=st.booleans(),
    is_shared=st.booleans(),
)
def test_a_step_has_a_block_of_prompts_at_least_and_more_for_more_that_wait(
    decodes: int, available: int, spread: int, most_decode: bool, is_shared: bool
) -> None:
    budget = PromptBudget(MOST, spread=spread)
    one = budget.of_step(decodes, available, most_decode=most_decode, is_shared=is_shared)
    more = budget.of_step(decodes, available + 100, most_decode=most_decode, is_shared=is_shared)
    assert BLOCK_SIZE <= one <= more <= MOST
    assert one <= budget.of_step(decodes, available, most_decode=most_decode, is_shared=False)
    if not is_shared and not (most_decode and spread and available <= FEW * spread):
        assert one == MOST, "most wait for their prompts, or many tokens do"


def test_few_prompts_make_a_step_up_to_some_size_and_many_have_whole_ones() -> None:
    budget = PromptBudget(MOST, spread=256)
    assert beside_decodes(budget, 600, decodes=32) == 256 - 32
    assert beside_decodes(budget, 1024, decodes=32) == 256 - 32
    assert beside_decodes(budget, 1025, decodes=32) == MOST
    assert beside_decodes(budget, 100, decodes=255) == BLOCK_SIZE
    assert beside_decodes(PromptBudget(MOST, spread=0), 100, decodes=32) == MOST


@pytest.mark.parametrize("seed", range(5))
def test_prompts_of_a_shared_step_follow_what_tokens_have_taken(seed: int) -> None:
    """Times with noise, and a tenth of them far too long: steps keep within the bound all the same."""
    rng = random.Random(seed)
    decodes_s, token_s = rng.uniform(0.005, 0.05), rng.uniform(2e-5, 1e-3)
    budget = PromptBudget(1 << 20, spread=0)
    for number in range(2 * WINDOW):
        tokens = rng.choice([0, 0, 0, rng.randrange(20, 200)])
        seconds = (decodes_s + tokens * token_s) * rng.uniform(0.98, 1.02)
        budget.note(8, tokens, seconds * (10 if number % 10 == 0 else 1))
    for lengthening, most_decode in ((LENGTHENING, True), (PROMPTS_LENGTHENING, False)):
        tokens = budget.of_step(8, 1 << 20, most_decode=most_decode, is_shared=True)
        wanted = max(lengthening * decodes_s, PATIENCE_S)
        assert tokens * token_s == pytest.approx(wanted, rel=0.35) or tokens == BLOCK_SIZE


def test_what_a_token_takes_stays_known_when_all_steps_are_of_one_size() -> None:
    budget = PromptBudget(MOST, spread=0)
    for number in range(WINDOW):
        budget.note(8, 100 * (number % 2), 0.020 + 0.001 * 100 * (number % 2))
    assert beside_decodes(budget, MOST, is_shared=True) == pytest.approx(PATIENCE_S / 0.001, abs=1)
    for _ in range(2 * WINDOW):
        budget.note(8, 50, 0.200 + 0.001 * 50)
    assert beside_decodes(budget, MOST, is_shared=True) == pytest.approx(LENGTHENING * 200, abs=1)


def test_prompts_may_take_some_milliseconds_however_short_the_decodes() -> None:
    budget = PromptBudget(MOST, spread=0)
    for number in range(WINDOW):
        budget.note(8, 100 * (number % 2), 0.006 + 0.00002 * 100 * (number % 2))
    assert beside_decodes(budget, MOST, is_shared=True) == pytest.approx(PATIENCE_S / 0.00002, rel=0.01)


def test_steps_without_decodes_say_nothing_of_what_those_wait_for() -> None:
    budget = PromptBudget(MOST, spread=0)
    guessed = beside_decodes(budget, MOST, is_shared=True)
    for number in range(2 * WINDOW):
        budget.note(0, 1000 + number, 9.0)
    assert beside_decodes(budget, MOST, is_shared=True) == guessed


def with_limits(engine: Engine, limits: SchedulerLimits) -> Engine:
    engine.scheduler = type(engine.scheduler)(limits, engine.pool, engine.gate)
    engine.runner.max_num_batched_tokens = limits.max_num_batched_tokens
    return engine


def prompt_tokens(plan: StepPlan) -> int:
    return sum(len(row.tokens) for row in plan.rows if len(row.tokens) > 1)


def decoding(engine: Engine, count: int, *, adapter: str = "") -> None:
    """Has so many sequences decode."""
    for number in range(count):
        request = make_request([number] * 5, request_id=1000 + number, adapter=adapter, max_tokens=500)
        engine.scheduler.add(request)
    while prompt_tokens(engine.step()) or engine.scheduler.num_running < count:
        engine.wait_for_loads()


def test_a_prompt_is_spread_over_steps_of_decodes() -> None:
    limits = SchedulerLimits(8, 1024, 1000, spread_prompts=64)
    engine = with_limits(make_engine(num_blocks=800), limits)
    decoding(engine, 4)
    engine.scheduler.add(make_request([9] * 240, request_id=1, max_tokens=5))
    assert [prompt_tokens(engine.step()) for _ in range(5)] == [60, 60, 60, 60, 0]
    engine.scheduler.add(make_request([10] * 300, request_id=2, max_tokens=5))
    assert prompt_tokens(engine.step()) == 300, "where more waits, it has a whole step"
    engine.scheduler.abort_link("link")
    engine.run()
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize(("decodes", "expected"), [(3, 5 * 50), (4, 64 - 4)])
def test_where_most_wait_for_their_prompts_steps_are_whole(decodes: int, expected: int) -> None:
    """Few tokens wait, which would be spread if no more than half of the seats waited for them."""
    limits = SchedulerLimits(8, 512, 1000, spread_prompts=64)
    engine = with_limits(make_engine(num_blocks=800), limits)
    decoding(engine, decodes)
    for number in range(8 - decodes):
        engine.scheduler.add(make_request([10 + number] * 50, request_id=2 + number, max_tokens=5))
    assert prompt_tokens(engine.step()) == expected
    engine.close()


def test_who_waits_for_pages_is_not_among_those_that_could_run() -> None:
    limits = SchedulerLimits(8, 512, 1000, spread_prompts=64)
    engine = with_limits(make_engine(num_blocks=800, num_pages=1), limits)
    engine.store.add("here", 16)
    engine.store.add("away", 16)
    decoding(engine, 3, adapter="here")
    for number in range(20):
        engine.scheduler.add(make_request([9] * 200, request_id=50 + number, adapter="away", max_tokens=5))
    engine.step()
    engine.scheduler.add(make_request([10] * 200, request_id=1, max_tokens=5))
    assert prompt_tokens(engine.step()) == 64 - 3
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_loop_tells_how_long_the_device_has_worked(overlap: bool) -> None:
    engine = make_engine()
    engine.runner.step_s = 0.003
    loop = EngineLoop(engine.scheduler, engine.runner, engine.gate, threading.Event(), overlap=overlap)
    told: list[float] = []
    engine.scheduler.note_time = lambda plan, seconds: told.append(seconds)  # type: ignore[method-assign]
    engine.scheduler.add(make_request(10, max_tokens=12))
    began = time.monotonic()
    while engine.scheduler.num_running + engine.scheduler.num_waiting:
        loop.step(lambda outputs: None)
    assert len(told) >= 12 and min(told) >= 0.003
    assert sum(told) <= time.monotonic() - began, "no time counts twice"
    engine.close()
