"""Adapters that apply from a later token on: what they share, and that nothing else changes for them."""

from __future__ import annotations

import pytest
from builders import Engine, expected_output, make_engine, make_request

from engine.block_pool import BLOCK_SIZE
from engine.sequence import Request

DOCUMENT = [token % 997 for token in range(100)]
INVOCATION = [501, 502, 503]


def assert_right(engine: Engine, *requests: Request) -> None:
    for request in requests:
        for choice in range(len(request.sampling)):
            key = (request.link, request.request_id, choice)
            assert engine.tokens[key] == expected_output(request, choice), key


def finish(engine: Engine) -> None:
    engine.run()
    engine.check_all_free()
    engine.close()


def test_ten_adapters_and_the_base_model_compute_one_document_once() -> None:
    engine = make_engine(num_pages=10, max_num_seqs=16)
    names = [f"adapter {number}" for number in range(10)]
    requests = [make_request(DOCUMENT, request_id=100)]
    for number, name in enumerate(names):
        engine.store.add(name)
        prompt = [*DOCUMENT, *INVOCATION]
        requests.append(make_request(prompt, request_id=number, adapter=name, adapter_start=len(DOCUMENT)))
    engine.scheduler.add(requests[0])
    engine.run()
    for request in requests[1:]:
        engine.scheduler.add(request)
    engine.run()
    whole_blocks = len(DOCUMENT) // BLOCK_SIZE * BLOCK_SIZE
    assert [engine.started["link", number] for number in range(10)] == [whole_blocks] * 10
    again = make_request(DOCUMENT, request_id=101)
    engine.scheduler.add(again)
    engine.run()
    assert engine.started["link", 101] == whole_blocks
    assert_right(engine, *requests, again)
    finish(engine)


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 31, 32, 99])
def test_only_whole_blocks_before_the_start_are_shared_with_the_base_model(start: int) -> None:
    engine = make_engine(max_num_batched_tokens=24)
    engine.store.add("one")
    base = make_request(DOCUMENT, request_id=1)
    activated = make_request(DOCUMENT, request_id=2, adapter="one", adapter_start=start)
    repeated = make_request(DOCUMENT, request_id=3, adapter="one", adapter_start=start)
    other_start = make_request(DOCUMENT, request_id=4, adapter="one", adapter_start=(start or 20) - 1)
    base_again = make_request(DOCUMENT, request_id=5)
    for request in (base, activated, repeated, other_start, base_again):
        engine.scheduler.add(request)
        engine.run()
    shared = start // BLOCK_SIZE * BLOCK_SIZE
    everything = (len(DOCUMENT) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert engine.started["link", 2] == shared
    assert engine.started["link", 3] == everything
    assert engine.started["link", 4] == ((start or 20) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert engine.started["link", 5] == everything
    assert_right(engine, base, activated, repeated, other_start, base_again)
    finish(engine)


@pytest.mark.parametrize("start", [1, 16, 21, 24])
def test_choices_and_preemption_keep_the_start_where_the_prompt_said(start: int) -> None:
    engine = make_engine(num_blocks=9, max_num_batched_tokens=8)
    engine.store.add("one")
    engine.store.add("other")
    requests = [
        make_request(25, request_id=1, adapter="one", adapter_start=start, n=3, max_tokens=30),
        make_request(25, request_id=2, adapter="other", adapter_start=start, max_tokens=40),
        make_request(25, request_id=3, max_tokens=40),
    ]
    for request in requests:
        engine.scheduler.add(request)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert_right(engine, *requests)
    finish(engine)


@pytest.mark.parametrize("start", [1, 16, 18, 19])
def test_a_request_continued_elsewhere_keeps_its_start(start: int) -> None:
    whole = make_request(20, adapter="one", adapter_start=start, max_tokens=40)
    known = expected_output(whole)[:15]
    engine = make_engine()
    engine.store.add("one")
    continued = make_request(20, adapter="one", adapter_start=start, max_tokens=40, output=known)
    engine.scheduler.add(continued)
    engine.run()
    assert [*known, *engine.tokens["link", 1, 0]] == expected_output(whole)
    finish(engine)
