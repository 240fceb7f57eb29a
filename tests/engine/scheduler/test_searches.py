"""Beam searches in the scheduler: what they share and copy, and how they come, wait and go as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Engine, digest_of, expected_answers, expected_output, make_engine, make_request

from engine.beams import EarlyStopping
from engine.scheduler.block_tables import BlockTables
from engine.scheduler.turns import LEAST_TURN
from engine.sequence import Request, Sequence
from engine.step import RowResult, StepPlan, StepResult, TokenLogprobs

WIDTH = 4


def make_search(
    prompt: int | list[int] = 40, *, n: int = WIDTH, max_tokens: int = 30, **more: object
) -> Request:
    return make_request(prompt, n=n, max_tokens=max_tokens, search={}, **more)  # type: ignore[arg-type]


def answers_of(engine: Engine, request: Request) -> list[list[int]]:
    link, number = request.key
    return [engine.tokens[link, number, choice] for choice in range(len(request.sampling))]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("early", list(EarlyStopping))
def test_a_search_finds_what_it_would_with_nothing_shared(depth: int, early: EarlyStopping) -> None:
    engine = make_engine(depth=depth)
    search = make_request(21, n=3, max_tokens=60, stop=[0, 1], search={"early_stopping": early})
    other = make_request([4] * 30, request_id=2, n=2, max_tokens=25)
    for request in (search, other):
        engine.scheduler.add(request)
    engine.run()
    assert answers_of(engine, search) == expected_answers(search)
    assert answers_of(engine, other) == [expected_output(other, choice) for choice in range(2)]
    ends = [engine.finished["link", 1, choice] for choice in range(3)]
    assert ends == [("STOP" if tokens[-1] in (0, 1) else "LENGTH", "") for tokens in expected_answers(search)]
    engine.check_all_free()
    engine.close()


def test_each_step_has_one_row_for_each_beam() -> None:
    engine = make_engine()
    engine.scheduler.add(make_search(max_tokens=6))
    assert [len(row.tokens) for row in engine.step().rows] == [40]
    for _ in range(5):
        assert [len(row.tokens) for row in engine.step().rows] == [1] * WIDTH
    assert engine.scheduler.num_running == 0
    assert engine.searched["link", 1] == 6 * WIDTH, "a token for each beam in each step"
    engine.close()


def test_a_search_for_one_token_ends_with_its_prompt() -> None:
    engine = make_engine()
    search = make_search(20, max_tokens=1, logprobs=2)
    engine.scheduler.add(search)
    engine.run()
    assert answers_of(engine, search) == expected_answers(search)
    assert engine.searched["link", 1] == WIDTH and engine.runner.num_steps == 1
    engine.check_all_free()
    engine.close()


class ByHand:
    """A search whose candidates a test makes up, step by step, by what goes on from which beam."""

    def __init__(self, request: Request, num_blocks: int = 64, max_num_seqs: int = 8) -> None:
        self.engine = make_engine(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        self.scheduler = self.engine.scheduler
        self.scheduler.add(request)
        self.plan = self.scheduler.schedule()

    @property
    def seats(self) -> list[Sequence]:
        return list(self.scheduler._running)

    @property
    def num_held(self) -> int:
        return self.engine.pool.num_blocks - self.engine.pool.num_idle

    def step(self, children: dict[int, int]) -> StepPlan:
        """Lets the beam of each row have so many children, by the place of its row. Plans the next step."""
        rows = []
        for place, row in enumerate(self.plan.rows):
            if row.sampling is None:
                continue
            assert row.sampling.logprobs is not None
            tops = [-0.001 * (1 + i) - place / 1e5 for i in range(children.get(place, 0))]
            tops += [-50.0 - i for i in range(row.sampling.logprobs - len(tops))]
            top = TokenLogprobs(0.0, tuple(range(100, 100 + len(tops))), tuple(tops))
            rows.append(RowResult(row.seq_id, 0, top))
        self.scheduler.update(self.plan, StepResult(tuple(rows)))
        self.scheduler.check()
        self.plan = self.scheduler.schedule()
        self.scheduler.check()
        return self.plan


def test_blocks_are_shared_and_copies_are_as_few_as_can_be() -> None:
    """The prompt has two full blocks and half of one, which is copied for all beams but one."""
    by_hand = ByHand(make_search(40))
    assert by_hand.num_held == 3
    plan = by_hand.step({0: 4})
    assert len(plan.rows) == 4 and len(plan.block_copies) == 3
    assert by_hand.num_held == 2 + 4
    assert {source for source, _ in plan.block_copies} == {by_hand.seats[3].block_ids[2]}, "the last keeps it"
    for _ in range(3):
        before = [list(seat.block_ids) for seat in by_hand.seats]
        plan = by_hand.step({0: 1, 1: 1, 2: 1, 3: 1})
        assert plan.block_copies == (), "an only child needs no copy"
        assert [list(seat.block_ids) for seat in by_hand.seats] == before, "and stays where it is"
    assert by_hand.num_held == 2 + 4
    plan = by_hand.step({0: 2, 1: 1, 3: 1})
    assert len(plan.block_copies) == 1, "one beam has two children, and one has none"
    assert by_hand.num_held == 2 + 4
    plan = by_hand.step({1: 4})
    assert len(plan.block_copies) == 3 and by_hand.num_held == 2 + 4
    assert all(seat.block_ids[:2] == by_hand.seats[0].block_ids[:2] for seat in by_hand.seats)
    by_hand.scheduler.abort("link", 1)
    by_hand.engine.check_all_free()
    by_hand.engine.close()


def test_at_a_blocks_border_nothing_is_copied() -> None:
    by_hand = ByHand(make_search(48))
    plan = by_hand.step({0: 4})
    assert plan.block_copies == () and by_hand.num_held == 3 + 4
    for _ in range(15):
        by_hand.step({0: 1, 1: 1, 2: 1, 3: 1})
    assert by_hand.num_held == 3 + 4
    plan = by_hand.step({2: 4})
    assert plan.block_copies == (), "the beams begin new blocks after one that they share"
    assert by_hand.num_held == 3 + 1 + 4
    by_hand.engine.close()


def test_beams_over_a_long_prompt_hold_it_once() -> None:
    engine = make_engine(num_blocks=128, max_num_batched_tokens=1024)
    engine.scheduler.add(make_search(1000, max_tokens=40))
    for _ in range(20):
        engine.step()
    held = engine.pool.num_blocks - engine.pool.num_idle
    assert 1000 // 16 < held <= 1000 // 16 + WIDTH * 2
    engine.run()
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize(("prompt", "max_tokens", "most"), [(20, 45, 1 + 3 * 4), (5, 8, 3)])
def test_a_search_fits_where_its_most_blocks_are_all_there_are(
    prompt: int, max_tokens: int, most: int
) -> None:
    """Without a prefix cache that could help, and with the whole pool needed: by the last step, or by the
    first, in which one of the beams keeps the block that they share.
    """
    search = make_search(prompt, n=3, max_tokens=max_tokens)
    assert search.most_blocks == most
    engine = make_engine(num_blocks=search.most_blocks, enable_prefix_caching=False)
    engine.scheduler.add(search)
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert answers_of(engine, search) == expected_answers(search)
    engine.check_all_free()
    engine.close()


@pytest.fixture(params=[0, 1], ids=["one by one", "overlapped"])
def tight(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(num_blocks=16, max_num_seqs=8, depth=request.param)
    yield engine
    engine.check_all_free()
    engine.close()


def test_two_searches_that_do_not_fit_together_take_turns_whole(tight: Engine) -> None:
    """Each alone needs most of the pool. The one admitted first is never the one that waits."""
    first, second = (make_search([n] * 24, request_id=n, n=4, max_tokens=36) for n in (1, 2))
    assert first.most_blocks == 13
    for request in (first, second):
        tight.scheduler.add(request)
    order = []
    while tight.scheduler.num_running + tight.scheduler.num_waiting:
        tight.step()
        running = [seq.request.request_id for seq in tight.scheduler._running]
        assert running.count(1) in (0, 1, 4) and running.count(2) in (0, 1, 4), "half a search"
        order += [
            number for number in (1, 2) if ("link", number, 0) in tight.finished and number not in order
        ]
    assert tight.scheduler.num_preemptions > 0 and order == [1, 2]
    for request in (first, second):
        assert answers_of(tight, request) == expected_answers(request)
        assert tight.searched["link", request.request_id] == 36 * 4, "not again for what was computed again"


def test_a_preempted_search_goes_on_with_its_beams(tight: Engine) -> None:
    ordinary = [make_request([n] * 30, request_id=n, max_tokens=60) for n in (1, 2)]
    search = make_search([9] * 20, request_id=9, n=3, max_tokens=40)
    for request in (*ordinary, search):
        tight.scheduler.add(request)
    tight.run()
    assert tight.scheduler.num_preemptions > 0
    assert answers_of(tight, search) == expected_answers(search)
    for request in ordinary:
        assert answers_of(tight, request) == [expected_output(request)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [4, 8, 64])
@pytest.mark.parametrize("every", [5, 6, 9, 17])
def test_a_search_may_be_preempted_at_any_point(
    every: int, budget: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while some of its beams are computed again and others not yet, and while a step is under way."""
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=budget, depth=depth)
    search = make_search(20, max_tokens=60)
    prepare, asked, partly = BlockTables.prepare_beams, 0, 0

    def now_and_then(tables: BlockTables, beams: list[Sequence], copies: list[tuple[int, int]]) -> bool:
        nonlocal asked, partly
        asked += 1
        fits = bool(asked % every or engine.scheduler.num_preemptions >= 40)
        partly += not fits and beams != [] and bool(beams[0].search and beams[0].search.tops)
        return fits and prepare(tables, beams, copies)

    monkeypatch.setattr(BlockTables, "prepare_beams", now_and_then)
    engine.scheduler.add(search)
    engine.run()
    assert answers_of(engine, search) == expected_answers(search)
    assert engine.searched["link", 1] == 60 * WIDTH
    assert engine.scheduler.num_preemptions >= 3
    assert partly or (budget, every) != (8, 5), "while the candidates of some of its beams were there"
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 7])
@pytest.mark.parametrize("how", ["abort", "one choice", "disconnect", "deadline", "failure"])
@pytest.mark.parametrize("depth", [0, 1])
def test_whatever_ends_a_search_frees_all_of_it_at_once(how: str, stage: int, depth: int) -> None:
    now = 0.0
    engine = make_engine(max_num_batched_tokens=16, depth=depth, clock=lambda: now)
    engine.store.add("a")
    search = make_search(24, adapter="a", arrival=0.0, deadline=50.0)
    engine.scheduler.add(search)
    for _ in range(stage):
        while not engine.step().rows and engine.scheduler.is_loading:
            engine.wait_for_loads()
    if how == "failure":
        plan = engine.scheduler.schedule()
        while engine.under_way:
            engine.take_in()
        engine.scheduler.fail(plan, "it broke")
        if not plan.rows:
            engine.scheduler.abort("link", 1)
    elif how == "disconnect":
        engine.scheduler.abort_link("link")
    elif how == "deadline":
        now = 60.0
        engine.step()
    else:
        engine.scheduler.abort("link", 1, 2 if how == "one choice" else None)
    engine.check_all_free()
    assert engine.scheduler.num_running + engine.scheduler.num_waiting == 0
    assert all(status.references == 0 for status in engine.gate.statuses())
    while engine.under_way:
        engine.take_in()
    engine.collect()
    if how != "disconnect":
        assert len(engine.finished) == WIDTH and not engine.tokens
    engine.check_all_free()
    engine.close()


def test_an_adapter_that_overflows_ends_its_own_search_alone() -> None:
    engine = make_engine()
    engine.store.add("bad", poison=True)
    engine.store.add("good")
    searches = [
        make_search(24, request_id=number, n=3, adapter=name, max_tokens=10)
        for number, name in enumerate(("bad", "good", ""), 1)
    ]
    for search in searches:
        engine.scheduler.add(search)
    engine.run()
    assert [engine.finished["link", 1, choice][0] for choice in range(3)] == ["ERROR"] * 3
    for search in searches[1:]:
        assert answers_of(engine, search) == expected_answers(search)
    engine.check_all_free()
    engine.close()


def test_one_beam_that_is_not_finite_ends_the_search() -> None:
    by_hand = ByHand(make_search(40))
    plan = by_hand.step({0: 4})
    rows = tuple(
        RowResult(row.seq_id, 0, TokenLogprobs(0.0), "nan" if i == 2 else None)
        for i, row in enumerate(plan.rows)
    )
    by_hand.scheduler.update(plan, StepResult(rows))
    by_hand.engine.collect()
    assert {end[0] for end in by_hand.engine.finished.values()} == {"ERROR"}
    by_hand.engine.check_all_free()
    by_hand.engine.close()


def test_searches_are_charged_by_the_row_and_their_prompt_once() -> None:
    engine = make_engine()
    engine.scheduler.add(make_search(40, max_tokens=6, tenant="searcher"))
    engine.run()
    served = engine.scheduler._counters.account("searcher").served
    assert served == 40 + 2 * (1 + 5 * WIDTH)
    engine.close()


def test_the_prompts_logprobs_of_a_search_are_told_once() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    search = make_search(40, prompt_logprobs=1, max_tokens=5)
    engine.scheduler.add(search)
    engine.run()
    assert engine.told["link", 1] == list(search.prompt)[1:]
    engine.close()


def test_a_tenants_only_search_is_not_made_to_yield_seat_by_seat() -> None:
    """It is all that its tenant has, so it has its turn, as a single sequence would."""
    engine = make_engine(max_num_seqs=WIDTH, num_blocks=64)
    for number, tenant in enumerate(("first", "second"), 1):
        engine.scheduler.add(make_search(20, request_id=number, tenant=tenant, max_tokens=20))
    engine.run()
    assert engine.scheduler.figures()["seat_yields"] == 0
    assert [number for _, number, choice in engine.finished if choice == 0] == [1, 2]
    engine.close()


def test_what_a_search_computes_again_is_no_part_of_its_turn() -> None:
    """Else a search whose beams parted long ago would never get on, while others keep coming."""
    one_each = dict.fromkeys(range(WIDTH), 1)
    by_hand = ByHand(make_search(20, max_tokens=80, tenant="searcher"), max_num_seqs=WIDTH)
    by_hand.step({0: WIDTH})
    for _ in range(LEAST_TURN + 8):
        by_hand.step(one_each)
    scheduler = by_hand.scheduler
    scheduler.add(make_request(5, request_id=2, tenant="second", max_tokens=1, logprobs=0))
    by_hand.step(one_each)
    while len(by_hand.seats) < WIDTH:
        by_hand.step({})
    assert scheduler.figures()["seat_yields"] == 1
    scheduler.add(make_request(5, request_id=3, tenant="third", max_tokens=1, logprobs=0))
    first, length = by_hand.seats[0], 0
    before = len(first.tokens)
    while len(by_hand.seats) == WIDTH:
        length = len(first.tokens)
        by_hand.step(one_each)
    assert length - before >= LEAST_TURN - 1, "so long it has been one"
    scheduler.abort("link", 1)
    scheduler.abort("link", 3)
    by_hand.engine.check_all_free()
    by_hand.engine.close()


def test_a_tenants_second_search_makes_room_whole() -> None:
    engine = make_engine(max_num_seqs=2 * WIDTH, num_blocks=64)
    for number in (1, 2):
        engine.scheduler.add(make_search(20, request_id=number, tenant="busy", max_tokens=40))
    for _ in range(5):
        engine.step()
    engine.scheduler.add(make_request(20, request_id=3, tenant="new", max_tokens=3))
    engine.step()
    running = [seq.request.request_id for seq in engine.scheduler._running]
    assert running == [1, 1, 1, 1, 3], "in the step after, instead of the one that was admitted last"
    assert engine.scheduler.figures()["seat_yields"] == 1
    engine.run()
    for number in (1, 2):
        search = make_search(20, request_id=number, max_tokens=40)
        assert answers_of(engine, search) == expected_answers(search)
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_background_searches_give_way_whole(depth: int) -> None:
    engine = make_engine(max_num_seqs=2 * WIDTH, depth=depth)
    searches = [make_search(20, request_id=n, max_tokens=30, background=True) for n in (3, 4)]
    for search in searches:
        engine.scheduler.add(search)
    for _ in range(8):
        engine.step()
    engine.scheduler.add(make_request([5] * 20, request_id=2, n=6, tenant="other", max_tokens=4))
    engine.step()
    assert {seq.request.request_id for seq in engine.scheduler._running} == {2}
    engine.run()
    for search in searches:
        assert answers_of(engine, search) == expected_answers(search)
    engine.check_all_free()
    engine.close()


def test_an_adapters_search_yields_its_pages_whole() -> None:
    """One adapter fits at a time. The search has had its turn when the other is wanted."""
    engine = make_engine(num_pages=1, num_blocks=128, max_num_seqs=8)
    for name in ("a", "b"):
        engine.store.add(name)
    searches = [
        make_search(20, request_id=number, adapter=name, tenant=name, max_tokens=200)
        for number, name in enumerate(("a", "b"), 1)
    ]
    engine.scheduler.add(searches[0])
    while ("link", 1) not in engine.searched or engine.searched["link", 1] < 40 * WIDTH:
        if not engine.step().rows:
            engine.wait_for_loads()
    engine.scheduler.add(searches[1])
    engine.step()
    while digest_of("b") not in engine.store.local:
        engine.wait_for_loads()
    engine.run()
    assert engine.gate.memory().counters.yields >= 1
    for search in searches:
        assert answers_of(engine, search) == expected_answers(search)
    engine.check_all_free()
    engine.close()
