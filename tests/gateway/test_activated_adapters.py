"""What engines are told of activated adapters, also when a request moves from one to another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.local_stack import LocalStack, wait_until

READER, SPEAKER = b"\xa1" * 32, b"\xb2" * 32
INVOCATION = (300, 301)


@pytest.fixture
def two_engines(valkey_url: str, tmp_path: Path) -> Iterator[LocalStack]:
    engines = [FakeEngine(name, valkey_url) for name in ("engine-1", "engine-2")]
    stack = LocalStack(valkey_url, tmp_path / "store", engines)
    stack.start()
    try:
        wait_until(lambda: httpx.get(f"{stack.url}/ready").json()["engines"] == 2, "both engines are linked")
        yield stack
    finally:
        stack.stop()


def test_an_activated_adapter_starts_with_the_last_invocation_of_each_prompt(local_stack: LocalStack) -> None:
    client = local_stack.client(local_stack.add_tenant("acme"))
    local_stack.add_adapter("acme", "reader", READER, invocation_tokens=INVOCATION)
    local_stack.add_adapter("acme", "speaker", SPEAKER)
    prompts = [[5, *INVOCATION, 6, *INVOCATION, 7], [*INVOCATION, 300], [5, 300, 6, 301]]
    answer = client.completions.create(model="reader", prompt=prompts, n=2, max_tokens=2)
    assert (answer.model, len(answer.choices)) == ("reader@1", 6)
    assert client.completions.create(model="speaker", prompt=prompts[0], max_tokens=2).model == "speaker@1"
    client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=2)
    told = [(bytes(each.adapter_digest), each.adapter_start) for each in local_stack.engines[0].submits]
    assert told == [(READER, 4), (READER, 0), (b"", 0), (SPEAKER, 0), (b"", 0)]


def test_a_request_that_moves_to_another_engine_keeps_its_start(two_engines: LocalStack) -> None:
    """Also when the answer holds the invocation, as what is generated does not move it."""
    client = two_engines.client(two_engines.add_tenant("acme"))
    two_engines.add_adapter("acme", "reader", READER, invocation_tokens=INVOCATION)
    first, second = two_engines.engines
    first.holds_at = second.holds_at = 20
    arguments: dict[str, Any] = {"max_tokens": 150, "seed": 3, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(
        model="reader", prompt=[5, 6, *INVOCATION, 7], n=2, stream=True, **arguments
    )
    told: set[int] = set()
    running = other = None
    for chunk in stream:
        told |= {choice.index for choice in chunk.choices}
        if running is None and len(told) == 2:
            running, other = (first, second) if first.running else (second, first)
            other.holds_at = None
            two_engines.call(running.stop())
    assert running and other
    assert len(other.submits) == 2 and all(each.output_tokens for each in other.submits)
    for submit in (*running.submits, *other.submits):
        assert (submit.adapter_digest, submit.adapter_start) == (READER, 2)


def test_adapters_over_one_document_meet_on_one_engine(two_engines: LocalStack) -> None:
    """Wherever they are in memory."""
    client = two_engines.client(two_engines.add_tenant("acme"))
    document = list(range(3, 103))
    for number, engine in enumerate(two_engines.engines):
        engine.residency[(bytes([number]) * 32).hex()] = "device"
    known = two_engines.app.state.services.engines.residency
    wait_until(
        lambda: all(known((bytes([number]) * 32).hex()) for number in range(2)), "leases have been read"
    )
    for number in range(8):
        name = f"reader-{number}"
        two_engines.add_adapter("acme", name, bytes([number]) * 32, invocation_tokens=INVOCATION)
        client.completions.create(model=name, prompt=[*document, *INVOCATION], max_tokens=2)
    client.completions.create(model=MODEL, prompt=document, max_tokens=2)
    assert sorted(len(engine.submits) for engine in two_engines.engines) == [0, 9]
