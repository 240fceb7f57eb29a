"""Background work takes what others leave over, all of it, and nothing else."""

from __future__ import annotations

from statistics import mean

import pytest
from builders import make_engine, make_request, step_until
from virtual_engine import Life, VirtualEngine

from engine.scheduler.background import account_name

SEATS = 8


def serve(*, background: int, adapters: bool = False) -> tuple[VirtualEngine, list[Life]]:
    """Requests that come now and then, and maybe work of two tenants that is there all along."""
    engine = VirtualEngine(max_num_seqs=SEATS, num_pages=2 if adapters else 8, num_blocks=200)
    names = [f"a{i}" for i in range(5)] if adapters else [""]
    for name in filter(None, names):
        engine.store.add(name, 16)
    for i in range(background):
        engine.send(
            make_request(
                60,
                link="work",
                request_id=i,
                tenant=f"t{i % 2}",
                background=True,
                max_tokens=200,
                adapter=names[i % len(names)],
                scope=f"w{i}",
            ),
            0.0,
        )
    lives = [
        engine.send(
            make_request(
                40,
                request_id=i,
                tenant="t0",
                max_tokens=20,
                adapter=names[-1 - i % min(2, len(names))],
                scope=f"i{i}",
            ),
            5.0 + 3.0 * (i // 4) + 0.05 * (i % 4),
        )
        for i in range(24)
    ]
    return engine, lives


@pytest.mark.parametrize("adapters", [False, True], ids=["base", "adapters"])
def test_nobody_waits_for_background_work(adapters: bool) -> None:
    alone, expected = serve(background=0, adapters=adapters)
    alone.run()
    engine, lives = serve(background=60, adapters=adapters)
    engine.run(until=60.0)
    step = 0.018 + 0.00085 * (SEATS + 32)
    for life, other in zip(lives, expected, strict=True):
        # The step under way when it comes, and longer ones, since others are in them; where its adapter has
        # no room, those in which it claims it, gets it, and has it copied. No turn of another, and no seat.
        assert life.ttft <= other.ttft + (6 if adapters else 4) * step, (life.ttft, other.ttft)
    mean_ttft, mean_alone = mean(life.ttft for life in lives), mean(life.ttft for life in expected)
    assert mean_ttft <= mean_alone + 2.5 * step, (mean_ttft, mean_alone)
    assert all(life.num_tokens == 20 for life in lives)


def test_background_work_takes_all_that_is_left_and_ends() -> None:
    engine, _ = serve(background=60)
    running: list[tuple[float, int]] = []
    engine.after_step = lambda plan: running.append((engine.now, engine.scheduler.num_running))
    engine.run(until=4.0)
    assert {count for at, count in running if at > 1.0} == {SEATS}
    engine.run()
    work = [life for (link, _), life in engine.lives.items() if link == "work"]
    assert all(life.ended is not None and life.num_tokens == 200 for life in work)
    engine.scheduler.check()


def test_background_work_of_two_tenants_is_served_alike() -> None:
    engine = VirtualEngine(max_num_seqs=SEATS)
    for i in range(80):
        tenant = "flood" if i < 60 else "other"
        engine.send(
            make_request(40, request_id=i, tenant=tenant, background=True, max_tokens=100, scope=f"{i}"),
            0.0,
        )
    engine.run(until=10.0)
    served = {
        tenant: sum(amount for _, amount in engine.service[account_name(tenant, background=True)])
        for tenant in ("flood", "other")
    }
    assert served["other"] >= 0.8 * served["flood"] > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_seats_and_blocks_are_given_back_at_once(depth: int) -> None:
    engine = make_engine(max_num_seqs=4, num_blocks=40, depth=depth)
    for i in range(4):
        engine.scheduler.add(
            make_request(100, link="work", request_id=i, background=True, max_tokens=60, scope=f"{i}")
        )
    for _ in range(10):
        engine.step()
    assert engine.scheduler.num_running == 4
    for i in range(3):
        engine.scheduler.add(make_request(120, request_id=i, tenant=f"t{i}", max_tokens=5, scope=f"n{i}"))
    steps = 0
    while len([key for key in engine.started if key[0] == "link"]) < 3:
        steps += 1
        assert steps <= 3 + depth, "all three, and not one after the other"
        engine.step()
    engine.run()
    assert all(len(engine.tokens["work", i, 0]) == 60 for i in range(4)), "they go on afterwards"
    engine.check_all_free()
    engine.close()


def test_no_more_background_work_gives_way_than_it_takes() -> None:
    """Each holds seven blocks, and somebody else lacks two."""
    engine = make_engine(max_num_seqs=8, num_blocks=40)
    for i in range(4):
        engine.scheduler.add(
            make_request(100, link="work", request_id=i, background=True, max_tokens=60, scope=f"{i}")
        )
    while len(engine.started) < 4:
        engine.step()
    assert engine.scheduler.num_free_blocks == 12
    engine.scheduler.add(make_request(14 * 16, request_id=0, tenant="one", max_tokens=1, scope="next"))
    assert step_until(engine, 0) == 1
    assert engine.scheduler.figures()["seat_yields"] == 1 and engine.scheduler.num_running == 4
    engine.run()
    engine.check_all_free()
    engine.close()


def test_blocks_that_are_kept_for_growth_are_no_reason_to_wait() -> None:
    """There are as many as it needs, but not as many as must be free for it to start."""
    engine = make_engine(max_num_seqs=8, num_blocks=400)
    engine.scheduler.add(make_request(20, request_id=0, tenant="one", max_tokens=500, scope="first"))
    for i in range(3):
        engine.scheduler.add(
            make_request(100, link="work", request_id=i, background=True, max_tokens=400, scope=f"{i}")
        )
    while len(engine.started) < 4:
        engine.step()
    num_free = engine.scheduler.num_free_blocks
    engine.scheduler.add(make_request(16 * num_free, request_id=1, tenant="one", max_tokens=5, scope="next"))
    assert step_until(engine, 1) <= 2
    engine.run()
    engine.check_all_free()
    engine.close()


def test_background_work_stays_while_a_claim_keeps_others_from_starting() -> None:
    """Else it would go and come again, every second step, for one that cannot have its seat."""
    engine = make_engine(max_num_seqs=4, num_blocks=400, num_pages=1, enable_prefix_caching=False)
    for name in ("here", "next"):
        engine.store.add(name)
    engine.scheduler.add(make_request(20, request_id=0, adapter="here", max_tokens=300, scope="0"))
    step_until(engine, 0)
    for i in range(10):
        engine.scheduler.add(
            make_request(50, link="work", request_id=i, background=True, max_tokens=400, scope=f"w{i}")
        )
    engine.scheduler.add(make_request(20, request_id=1, adapter="next", max_tokens=300, scope="1"))
    while engine.gate.claim is None or engine.scheduler.num_running < 4:
        engine.step()
    engine.scheduler.add(make_request(20, request_id=2, adapter="here", max_tokens=300, scope="2"))
    step_until(engine, 1)
    assert engine.scheduler.figures()["seat_yields"] <= 2
    engine.close()


def test_a_claim_of_background_work_keeps_nobody_else_from_its_adapter() -> None:
    """It stands when somebody comes for the adapter that it waits for to leave."""
    engine = make_engine(num_pages=1, num_blocks=400)
    for name in "ab":
        engine.store.add(name)
    for tenant, name in (("one", "a"), ("two", "b")):
        engine.scheduler.add(
            make_request(5, link=tenant, adapter=name, tenant=tenant, background=True, max_tokens=300)
        )
        while (tenant, 1) not in engine.started and engine.gate.claim is None:
            engine.wait_for_loads()
            engine.step()
    assert ("two", 1) not in engine.started and engine.gate.claim is not None
    engine.scheduler.add(make_request(5, adapter="a", tenant="three", max_tokens=300))
    assert step_until(engine, 1) == 1
    engine.run()
    engine.check_all_free()
    engine.close()


def test_background_work_makes_nobody_yield() -> None:
    engine = make_engine(max_num_seqs=2, num_blocks=100)
    for i in range(6):
        engine.scheduler.add(make_request(20, request_id=i, tenant="one", max_tokens=50, scope=f"{i}"))
    engine.step()
    engine.scheduler.add(make_request(20, link="work", request_id=0, tenant="two", background=True))
    while len([key for key in engine.finished if key[0] == "link"]) < 5:
        assert ("work", 0) not in engine.started, "somebody else waits"
        engine.step()
    engine.run()
    assert len(engine.tokens["work", 0, 0]) == 8
    engine.close()
