"""Cold adapters: who steps aside, who goes on, and how long a cold one can be passed over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from builders import digest_of, expected_output, hold_reads, make_engine, make_request, step_until

from engine.adapter_status import Residency
from engine.adapter_tiers import MAX_LOADS
from engine.block_pool import BLOCK_SIZE
from engine.host_copy import HostCopy
from engine.scheduler.placements import PLACEMENTS_PER_STEP
from engine.sequence import Request


def test_nobody_waits_for_another_ones_load() -> None:
    engine = make_engine()
    released = hold_reads(engine)
    engine.store.add("cold")
    engine.scheduler.add(make_request(20, request_id=1, adapter="cold"))
    engine.scheduler.add(make_request(20, request_id=2))
    assert len(engine.step().rows) == 1
    assert ("link", 2) in engine.started and ("link", 1) not in engine.started
    while ("link", 2, 0) not in engine.finished:
        engine.step()
    assert engine.step().rows == () and engine.scheduler.is_loading
    released.set()
    step_until(engine, 1)
    engine.run()
    assert engine.tokens["link", 1, 0] == expected_output(make_request(20, adapter="cold"))
    engine.check_all_free()
    engine.close()


def test_a_load_starts_when_its_request_comes_even_if_all_seats_are_taken() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.store.add("cold")
    engine.scheduler.add(make_request(20, request_id=1, max_tokens=50))
    engine.step()
    engine.scheduler.add(make_request(20, request_id=2, adapter="cold"))
    for _ in range(20):
        engine.step()
        engine.wait_for_loads()
    assert [status.residency for status in engine.gate.statuses()] == [Residency.DEVICE]
    assert ("link", 2) not in engine.started
    engine.close()


def test_a_load_that_fails_ends_its_requests_and_a_later_one_tries_again() -> None:
    engine = make_engine()
    engine.scheduler.add(make_request(20, request_id=1, adapter="late", n=2))
    engine.run()
    for choice in (0, 1):
        assert engine.finished["link", 1, choice] == ("ERROR", "the store has no such adapter")
    engine.store.add("late")
    engine.scheduler.add(make_request(20, request_id=2, adapter="late"))
    engine.run()
    assert engine.finished["link", 2, 0][0] == "LENGTH"
    engine.check_all_free()
    engine.close()


def test_a_copy_to_the_device_that_fails_ends_its_requests_alone() -> None:
    engine = make_engine()
    write = engine.runner.write_adapter

    def broken_write(pages: Sequence[int], copy: HostCopy) -> None:
        if copy.rank == 32:
            raise RuntimeError("out of luck")
        write(pages, copy)

    engine.gate._placements._write = broken_write
    engine.store.add("good")
    engine.store.add("bad", rank=32)
    for number, adapter in enumerate(("bad", "good")):
        engine.scheduler.add(make_request(20, request_id=number, adapter=adapter))
    engine.run()
    reason, error = engine.finished["link", 0, 0]
    assert reason == "ERROR" and "could not be copied to the device: out of luck" in error
    assert engine.finished["link", 1, 0][0] == "LENGTH"
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("ranks", [(16, 16), (8, 32)])
def test_one_slot_and_a_flood_the_cold_one_starts_within_the_bound(ranks: tuple[int, int]) -> None:
    """Pages for one of them; A, B, A, A, A, ... with A arriving faster than it finishes.

    The bound: when it is B's turn, what runs with A may end, and nothing of A starts any more. So B waits
    for one A's whole answer at most, besides its load and its turn.
    """
    tokens = 40
    engine = make_engine(num_pages=max(1, ranks[1] // 16), max_num_seqs=4, num_blocks=128)
    engine.store.add("a", ranks[0])
    engine.store.add("b", ranks[1])
    engine.scheduler.add(make_request(5, request_id=1, adapter="a", max_tokens=tokens))
    step_until(engine, 1)
    engine.scheduler.add(make_request(5, request_id=2, adapter="b", max_tokens=tokens))
    number, steps = 3, 0
    while ("link", 2) not in engine.started:
        while len(engine.scheduler._waiting) < 6:
            engine.scheduler.add(make_request(5, request_id=number, adapter="a", max_tokens=tokens))
            number += 1
        engine.step()
        steps += 1
        while engine.scheduler.is_loading and engine.tiers._done.empty():
            engine.wait_for_loads()
        assert steps <= tokens + 2
    while ("link", 2, 0) not in engine.finished:
        engine.step()
    assert engine.tokens["link", 2, 0] == expected_output(make_request(5, adapter="b", max_tokens=tokens))
    engine.close()


def test_base_and_other_adapters_go_on_while_a_claim_stands() -> None:
    engine = make_engine(num_pages=2, max_num_seqs=8, num_blocks=128, ends_bytes=50)
    for name in "abc":
        engine.tiers.want(engine.store.add(name, 16, ends_bytes=50 * (name == "b")))
        while engine.tiers.is_loading:
            engine.wait_for_loads()
            engine.tiers.poll()
    engine.scheduler.add(make_request(5, request_id=1, adapter="a", max_tokens=30))
    engine.scheduler.add(make_request(5, request_id=2, adapter="b", max_tokens=90))
    step_until(engine, 1)
    step_until(engine, 2)
    engine.scheduler.add(make_request(5, request_id=3, adapter="c", max_tokens=5))
    engine.step()
    assert engine.gate.claim == (digest_of("c"), frozenset([digest_of("a")])), (
        "the one that ends soonest, alone"
    )
    for number, adapter in ((4, "a"), (5, "b"), (6, "")):
        engine.scheduler.add(make_request(5, request_id=number, adapter=adapter, max_tokens=60))
    engine.step()
    assert ("link", 4) not in engine.started, "it would use `a` for longer"
    assert ("link", 5) in engine.started and ("link", 6) in engine.started
    assert step_until(engine, 3) <= 30
    engine.run()
    engine.check_all_free()
    engine.close()


def test_small_cold_adapters_do_not_take_the_pages_that_a_large_one_waits_for() -> None:
    engine = make_engine(num_pages=2, max_num_seqs=8, num_blocks=128)
    for number, name in enumerate(("a", "b"), start=1):
        engine.store.add(name, 16)
        engine.scheduler.add(
            make_request(5, request_id=number, adapter=name, max_tokens=20 * number, tenant="early")
        )
        step_until(engine, number)
    engine.store.add("large", 32)
    engine.scheduler.add(make_request(5, request_id=3, adapter="large"))
    steps, number = 0, 100
    while ("link", 3) not in engine.started:
        for tenant in ("tenant", "another"):
            engine.store.add(f"small-{number}", 16)
            request = make_request(
                5, request_id=number, adapter=f"small-{number}", max_tokens=30, tenant=tenant
            )
            engine.scheduler.add(request)
            number += 1
        engine.step()
        steps += 1
        while engine.scheduler.is_loading and engine.tiers._done.empty():
            engine.wait_for_loads()
        assert steps <= 45
    engine.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_claim_ends_with_the_last_who_wanted_it(background: bool) -> None:
    engine = make_engine(num_pages=1)
    engine.store.add("a", 16)
    engine.store.add("b", 16)
    engine.scheduler.add(make_request(5, request_id=1, adapter="a", max_tokens=100, background=background))
    step_until(engine, 1)
    engine.scheduler.add(make_request(5, request_id=2, adapter="b", background=background))
    for _ in range(5):
        engine.step()
        engine.wait_for_loads()
    engine.scheduler.abort("link", 2)
    engine.scheduler.add(make_request(5, request_id=3, adapter="a", max_tokens=300, background=background))
    assert step_until(engine, 3) == 1, "though it will use `a` for longer than the one that runs"
    engine.run()
    engine.check_all_free()
    engine.close()


def test_many_cold_adapters_in_little_room_all_get_their_turn() -> None:
    engine = make_engine(num_pages=2, num_blocks=128, host_bytes=150)
    requests = []
    for number in range(40):
        name = f"adapter-{number % 8}"
        engine.store.add(name, 16 if number % 8 else 32)
        requests.append(make_request(10, request_id=number, adapter=name, tenant=f"t{number % 3}"))
        engine.scheduler.add(requests[-1])
    engine.run()
    for request in requests:
        assert engine.tokens["link", request.request_id, 0] == expected_output(request)
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("most", PLACEMENTS_PER_STEP.values())
def test_a_step_that_others_wait_for_has_so_many_copies_to_the_device(most: int) -> None:
    engine = make_engine(num_pages=8, placements_per_step=most)
    writes: list[int] = []
    write = engine.runner.write_adapter

    def counting_write(pages: Sequence[int], copy: HostCopy) -> None:
        writes.append(engine.runner.num_steps)
        write(pages, copy)

    engine.gate._placements._write = counting_write
    engine.scheduler.add(make_request(5, request_id=0, max_tokens=60))
    engine.step()
    released = hold_reads(engine)
    for number in range(1, 1 + MAX_LOADS):
        engine.store.add(f"a{number}", 16)
        engine.scheduler.add(make_request(5, request_id=number, adapter=f"a{number}"))
    engine.step()
    released.set()
    while engine.tiers._done.qsize() < MAX_LOADS:
        engine.wait_for_loads()
    engine.run()
    assert len(writes) == MAX_LOADS and max(Counter(writes).values()) == most
    engine.close()


def test_copies_to_the_device_are_counted_with_what_they_take() -> None:
    engine = make_engine(num_pages=1)
    write = engine.runner.write_adapter

    def slow_write(pages: Sequence[int], copy: HostCopy) -> None:
        time.sleep(0.002)
        write(pages, copy)

    engine.gate._placements._write = slow_write
    for number, name in enumerate("aba"):
        engine.store.add(name)
        engine.scheduler.add(make_request(5, request_id=number, adapter=name))
        engine.run()
    counters = engine.gate.memory().counters
    assert counters.copies == 3 and 0.006 <= counters.copy_seconds < 3
    assert counters.evictions_device == 2
    engine.close()


def test_prefetch_answers_when_it_is_there_or_why_it_cannot_be() -> None:
    engine = make_engine(num_pages=1)
    answers: dict[str, str] = {}
    for name in ("a", "b"):
        engine.store.add(name)
    for name in ("a", "b", "missing"):
        digest = make_request(adapter=name).adapter_digest
        answer: Future[str] = Future()
        answer.add_done_callback(lambda answer, name=name: answers.update({name: answer.result()}))
        engine.gate.prefetch(digest, answer)
    for _ in range(200):
        engine.step()
        engine.wait_for_loads()
    assert answers == {"a": "", "b": "", "missing": "the store has no such adapter"}
    engine.close()


def test_unload_waits_for_the_last_sequence_and_then_forgets_all_copies() -> None:
    engine = make_engine()
    digest = engine.store.add("a")
    engine.scheduler.add(make_request(5, request_id=1, adapter="a", max_tokens=10))
    step_until(engine, 1)
    engine.gate.unload(digest)
    engine.step()
    assert [(status.residency, status.references) for status in engine.gate.statuses()] == [
        (Residency.DEVICE, 1)
    ]
    engine.run()
    engine.step()
    assert engine.gate.statuses() == []
    assert engine.finished["link", 1, 0][0] == "LENGTH"
    engine.close()


def test_unload_during_the_load_forgets_what_it_brings() -> None:
    engine = make_engine()
    released = hold_reads(engine)
    digest = engine.store.add("a")
    engine.scheduler.add(make_request(5, request_id=1, adapter="a"))
    engine.step()
    engine.scheduler.abort("link", 1)
    engine.gate.unload(digest)
    engine.step()
    released.set()
    while engine.scheduler.is_loading:
        engine.wait_for_loads()
        engine.step()
    assert engine.gate.statuses() == []
    engine.close()


def test_who_names_many_cold_adapters_does_not_make_others_wait_for_all_of_them() -> None:
    engine = make_engine(num_pages=2, num_blocks=256, max_num_seqs=4)
    released = hold_reads(engine)
    for number in range(30):
        engine.store.add(f"flood-{number}", 16)
        engine.scheduler.add(
            make_request(5, request_id=number, adapter=f"flood-{number}", tenant="flood", max_tokens=50)
        )
    mine = engine.store.add("mine")
    engine.step()
    engine.scheduler.add(make_request(5, request_id=99, adapter="mine", tenant="other"))
    released.set()
    step_until(engine, 99)
    assert engine.store.reads.index(mine) < 2 * MAX_LOADS
    engine.run()
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_what_is_on_its_way_to_the_device_is_not_evicted_for_the_next(depth: int) -> None:
    engine = make_engine(num_pages=2, num_blocks=256, max_num_seqs=8, depth=depth)
    engine.runner.landing_steps = 3
    requests = [make_request(5, request_id=9, max_tokens=300)]
    for number in range(6):
        engine.store.add(f"a{number}", 16)
        requests.append(make_request(5, request_id=number, adapter=f"a{number}", max_tokens=20))
    for request in requests:
        engine.scheduler.add(request)
        engine.wait_for_loads()
    engine.run()
    for request in requests:
        assert engine.tokens["link", request.request_id, 0] == expected_output(request)
    assert engine.runner.num_writes == 6, "each was copied once"
    engine.check_all_free()
    engine.close()


def test_a_claim_comes_to_its_pages_though_their_adapter_was_still_on_its_way() -> None:
    engine = make_engine(num_pages=1)
    engine.runner.landing_steps = 1000
    for name in ("a", "b"):
        engine.store.add(name, 16)
    requests = [make_request(5, request_id=n, adapter=name, max_tokens=8) for n, name in enumerate("aab")]
    engine.scheduler.add(requests[0])
    while not engine.scheduler.num_running:
        engine.wait_for_loads()
        engine.step()
    for request in requests[1:]:
        engine.scheduler.add(request)
        engine.wait_for_loads()
    engine.run(max_steps=2000)
    for request in requests:
        assert engine.tokens["link", request.request_id, 0] == expected_output(request)
    engine.check_all_free()
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_claimant_that_got_its_pages_while_the_step_was_planned_claims_no_more(depth: int) -> None:
    """Its victim's last sequence is preempted for blocks, after the step's look at the claim."""
    engine = make_engine(num_blocks=8, num_pages=1, max_num_seqs=2, max_num_batched_tokens=16, depth=depth)
    for name in "ab":
        engine.store.add(name, 16)
    comes = {0: ("b", 40, 40, "x"), 5: ("", 40, 80, "y"), 10: ("a", 20, 80, "x"), 20: ("a", 40, 10, "x")}
    requests: dict[int, Request] = {}
    for step in range(1000):
        if step in comes:
            adapter, prompt, max_tokens, tenant = comes[step]
            requests[step] = make_request(
                [step] * prompt, request_id=step, adapter=adapter, max_tokens=max_tokens, tenant=tenant,
                max_model_len=8 * BLOCK_SIZE,
            )  # fmt: skip
            engine.scheduler.add(requests[step])
        engine.step()
        while engine.scheduler.is_loading and engine.tiers._done.empty():
            engine.wait_for_loads()
    for request in requests.values():
        assert engine.tokens["link", request.request_id, 0] == expected_output(request)
    engine.check_all_free()
    engine.close()


def test_what_a_claim_waits_for_is_not_kept_while_its_copy_is_on_its_way() -> None:
    engine = make_engine(num_pages=2)
    engine.runner.landing_steps = 300
    for name, rank in (("a", 16), ("b", 16), ("large", 32)):
        engine.store.add(name, rank)
    requests = [
        make_request(5, request_id=0, adapter="a", max_tokens=100),
        make_request(5, request_id=1, adapter="b", max_tokens=100),
        make_request(5, request_id=2, adapter="large"),
        make_request(5, request_id=3, adapter="a"),
        make_request(5, request_id=4, max_tokens=200),
    ]
    for request in requests[:3]:
        engine.gate.begin_load(request.adapter_digest)
    while engine.tiers._done.qsize() < 3:
        engine.wait_for_loads()
    for request in requests[:2]:
        engine.scheduler.add(request)
    engine.step()
    assert engine.scheduler.num_running == 2, "nobody ran, so the step waited for both copies"
    engine.scheduler.add(requests[2])
    engine.step()
    assert engine.gate.claim == (digest_of("large"), frozenset([digest_of("a"), digest_of("b")]))
    engine.scheduler.abort("link", 0)
    engine.scheduler.add(requests[3])
    engine.scheduler.add(requests[4])
    engine.run(max_steps=2000)
    for request in requests[1:]:
        assert engine.tokens["link", request.request_id, 0] == expected_output(request)
    engine.check_all_free()
    engine.close()
