"""Who pays for bringing adapters, and that it counts as service."""

from __future__ import annotations

import pytest
from builders import Engine, digest_of, hold_reads, make_engine, make_request
from virtual_engine import Life, VirtualEngine

from engine.eviction import reload_cost
from engine.scheduler.load_bills import LoadBills

ONE_PAGE = reload_cost(1, in_host=False)
"""A load of one page from the disk to the device, in tokens of input."""


def served(engine: Engine, tenant: str) -> float:
    return engine.scheduler._counters.account(tenant).served


def test_a_load_costs_its_reading_and_its_copy() -> None:
    bills = LoadBills()
    bills.begin(b"adapter", "a")
    bills.read(b"adapter", 3)
    bills.copied(b"adapter", 3)
    assert sum(tokens for _, tokens in bills.take()) == pytest.approx(3 * reload_cost(3, in_host=False))
    bills.begin(b"adapter", "b")
    bills.copied(b"adapter", 3)
    assert bills.take() == [("b", 3 * reload_cost(3, in_host=True))], "from host memory it is a copy"
    bills.read(b"pinned", 3)
    bills.copied(b"pinned", 3)
    assert bills.take() == []


def test_who_needs_an_adapter_first_pays_for_it() -> None:
    engine = make_engine()
    engine.store.add("shared", 16)
    released = hold_reads(engine)
    for number, tenant in enumerate(("first", "second")):
        request = make_request(
            10, request_id=number, adapter="shared", tenant=tenant, scope=tenant, max_tokens=1
        )
        engine.scheduler.add(request)
    engine.step()
    assert served(engine, "first") == 0, "what it costs is known when it is here"
    released.set()
    engine.run()
    assert served(engine, "first") == 10 + 2 + ONE_PAGE
    assert served(engine, "second") == 10 + 2
    engine.close()


def test_who_gives_up_before_the_load_has_ended_pays_for_the_reading() -> None:
    engine = make_engine()
    engine.store.add("cold", 16)
    released = hold_reads(engine)
    engine.scheduler.add(make_request(10, request_id=1, adapter="cold", tenant="fickle"))
    engine.step()
    engine.scheduler.abort("link", 1)
    engine.step()
    released.set()
    while engine.tiers.is_loading:
        engine.step()
        engine.wait_for_loads()
    assert served(engine, "fickle") == ONE_PAGE - reload_cost(1, in_host=True)
    engine.step()
    engine.scheduler.add(make_request(10, request_id=2, adapter="cold", tenant="next", max_tokens=1))
    engine.run()
    assert served(engine, "fickle") == ONE_PAGE - reload_cost(1, in_host=True)
    engine.close()


def test_an_adapter_that_has_to_leave_and_comes_back_is_paid_for_again() -> None:
    engine = make_engine(num_pages=1)
    for name in ("one", "two"):
        engine.store.add(name, 16)
    for number, name in enumerate(("one", "two", "one")):
        engine.scheduler.add(make_request([number] * 10, request_id=number, adapter=name, max_tokens=1))
        engine.run()
    copy = reload_cost(1, in_host=True)
    assert served(engine, "tenant") == 3 * (10 + 2) + 2 * ONE_PAGE + copy
    assert engine.gate.status(digest_of("one")).history.loads == 1
    engine.close()


def test_a_tenant_that_makes_adapters_come_and_go_gets_less_else() -> None:
    """Two tenants send the same requests; one of them names another adapter each time."""
    engine = VirtualEngine(num_pages=2, num_blocks=64, max_num_seqs=2)
    engine.store.add("steady", 16)
    lives: dict[str, list[Life]] = {"steady": [], "changing": []}
    for number in range(300):
        engine.store.add(f"one-off-{number}", 16)
        for tenant, name in (("steady", "steady"), ("changing", f"one-off-{number}")):
            request = make_request(
                [number] * 10, link=tenant, request_id=number, adapter=name, tenant=tenant, max_tokens=5
            )
            lives[tenant].append(engine.send(request, 0.0))
    engine.run(until=12.0)
    counts = {tenant: sum(life.ended is not None for life in own) for tenant, own in lives.items()}
    assert all(30 < count < 290 for count in counts.values()), "both still wait"
    # 20 tokens a request, and 6 more for each load; some are read ahead, and paid for.
    assert counts["steady"] >= 1.25 * counts["changing"]
