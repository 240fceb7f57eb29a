"""What clients see when engines die, refuse or come back, and what engines see when clients go."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.fake_engine import MODEL, FakeEngine, expected_text
from tests.gateway.local_stack import LocalStack, wait_until
from tests.ports import reserve_port

ROOT = Path(__file__).parents[2]
FOREVER: dict[str, Any] = {"ignore_eos": True}


@contextmanager
def engine_process(redis_url: str, engine_id: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable, "-m", "tests.gateway.fake_engine",
        "--redis-url", redis_url, "--engine-id", engine_id, "--port", str(port), "--step-s", "0.01",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bare_stack(valkey_url: str, tmp_path: Path) -> Iterator[LocalStack]:
    """A gateway without engines."""
    stack = LocalStack(valkey_url, tmp_path / "store")
    stack.start()
    try:
        yield stack
    finally:
        stack.stop()


@pytest.fixture
def two_engines(valkey_url: str, tmp_path: Path) -> Iterator[LocalStack]:
    engines = [FakeEngine(name, valkey_url, step_s=0.01) for name in ("engine-1", "engine-2")]
    stack = LocalStack(valkey_url, tmp_path / "store", engines)
    stack.start()
    try:
        wait_until(lambda: httpx.get(f"{stack.url}/ready").json()["engines"] == 2, "both engines are linked")
        yield stack
    finally:
        stack.stop()


def test_requests_in_flight_continue_exactly_on_another_engine(
    two_engines: LocalStack, caplog: pytest.LogCaptureFixture
) -> None:
    client = two_engines.client(two_engines.add_tenant("acme"))
    first, second = two_engines.engines
    first.holds_at = second.holds_at = 20
    stream = client.completions.create(
        model=MODEL, prompt="go on", seed=3, n=3, max_tokens=150, stream=True, extra_body=FOREVER
    )
    texts = ["", "", ""]
    running = other = None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        if running is None and all(texts):
            running, other = (first, second) if first.submits else (second, first)
            assert running.submits and running.running
            other.holds_at = None
            two_engines.call(running.stop())
    assert running and other
    (original,) = running.submits
    assert texts == [expected_text(original, index) for index in range(3)]
    assert len(other.submits) == 3 and all(submit.output_tokens for submit in other.submits)
    assert [list(submit.seeds) for submit in other.submits] == [[seed] for seed in original.seeds]
    lost = [record for record in caplog.records if "lost engine" in record.message]
    assert len(lost) == 1 and "3 sequences in flight" in lost[0].message


def test_requests_in_flight_continue_on_the_engine_that_is_killed_and_restarted(
    bare_stack: LocalStack,
) -> None:
    port = reserve_port()
    client = bare_stack.client(bare_stack.add_tenant("acme"))
    with engine_process(bare_stack.redis_url, "e", port) as engine:
        bare_stack.wait_ready()
        arguments: dict[str, Any] = {
            "model": MODEL,
            "prompt": "go",
            "seed": 1,
            "max_tokens": 200,
            "extra_body": FOREVER,
        }
        whole = client.completions.create(**arguments)
        text = ""
        stream = client.completions.create(**arguments, stream=True)
        for chunk in stream:
            text += chunk.choices[0].text
            if text:
                engine.send_signal(signal.SIGKILL)
                engine.wait()
                break
        with engine_process(bare_stack.redis_url, "e", port):
            for chunk in stream:
                text += chunk.choices[0].text
    assert text == whole.choices[0].text


def test_when_no_engine_comes_in_time_the_stream_ends_with_an_error(bare_stack: LocalStack) -> None:
    bare_stack.call(_set_resume_timeout(bare_stack, 0.5))
    client = bare_stack.client(bare_stack.add_tenant("acme"))
    with engine_process(bare_stack.redis_url, "e", reserve_port()) as engine:
        bare_stack.wait_ready()
        stream = client.completions.create(
            model=MODEL, prompt="go", max_tokens=2000, stream=True, extra_body=FOREVER
        )
        next(iter(stream))
        engine.kill()
        with pytest.raises(openai.APIError, match="no other came in time"):
            list(stream)


async def _set_resume_timeout(stack: LocalStack, timeout_s: float) -> None:
    stack.app.state.services.engines._resume_timeout_s = timeout_s


def test_without_an_engine_ready_says_so_and_requests_get_503(bare_stack: LocalStack) -> None:
    answer = httpx.get(f"{bare_stack.url}/ready")
    assert answer.status_code == 503 and answer.json()["missing"] == ["no engine is ready"]
    assert httpx.get(f"{bare_stack.url}/health").status_code == 200
    client = bare_stack.client(bare_stack.add_tenant("acme"))
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model=MODEL, prompt="x")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


def test_a_refused_request_goes_to_another_engine(two_engines: LocalStack) -> None:
    client = two_engines.client(two_engines.add_tenant("acme"))
    first, second = two_engines.engines
    first.refusing = True
    prompts = [f"prompt number {index}" for index in range(8)]
    for prompt in prompts:
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, n=2)
    assert first.submits, "eight prompts are not all hashed to one engine"
    assert len(second.submits) == len(prompts)
    assert all(len(submit.seeds) == 2 for submit in second.submits)


def test_when_all_engines_refuse_the_client_is_told_to_retry(two_engines: LocalStack) -> None:
    client = two_engines.client(two_engines.add_tenant("acme"))
    for engine in two_engines.engines:
        engine.refusing = True
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="x", stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.code == "engine_overloaded"
        assert "retry-after" in caught.value.response.headers


def test_an_engine_that_breaks_the_contract_is_linked_anew(local_stack: LocalStack) -> None:
    client = local_stack.client(local_stack.add_tenant("acme"))
    (engine,) = local_stack.engines
    engine.garbled = True
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=20, extra_body=FOREVER)
    assert answer.usage is not None and answer.usage.completion_tokens == 20
    assert len(engine.submits) == 2


def test_the_base_model_is_the_one_that_the_engines_have_now(bare_stack: LocalStack, valkey_url: str) -> None:
    client = bare_stack.client(bare_stack.add_tenant("acme"))
    bare_stack.add_adapter("acme", "sql", b"\xa1" * 32)
    before = FakeEngine("engine-1", valkey_url, model="before", lease_s=2)
    bare_stack.call(before.start())
    bare_stack.wait_ready()
    bare_stack.call(before.stop())
    assert [model.id for model in client.models.list()] == ["before", "sql"], "known while it is away"
    after = FakeEngine("engine-2", valkey_url, model="after", digest=b"\x22" * 32)
    bare_stack.call(after.start())
    try:
        wait_until(lambda: client.models.list().data[0].id == "after", "the old engine's lease is gone")
        assert client.completions.create(model="sql", prompt="x", max_tokens=1).model == "sql@1"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="before", prompt="x")
    finally:
        bare_stack.call(after.stop())


# ---- clients that go --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_aborts_the_request_at_once(local_stack: LocalStack, stream: bool) -> None:
    key = await asyncio.to_thread(local_stack.add_tenant, "acme")
    engine = local_stack.engines[0]
    engine.holds_at = 1
    body = {"model": MODEL, "prompt": "x", "n": 2, "max_tokens": 1500, "stream": stream, **FOREVER}
    headers = {"authorization": f"Bearer {key}"}

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            await client.post(f"{local_stack.url}/v1/completions", json=body, headers=headers)

    task = asyncio.create_task(ask())
    await asyncio.to_thread(wait_until, lambda: len(engine.running) == 2, "the request runs")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, lambda: not engine.running, "the engine has stopped")
    assert len(engine.aborts) == 1

    def is_counted() -> bool:
        metrics = httpx.get(f"{local_stack.url}/metrics").text
        return (
            'outcome="disconnected",route="completions"} 1.0' in metrics
            and "loraplex_requests_running 0.0" in metrics
        )

    await asyncio.to_thread(wait_until, is_counted, "it is counted")


def test_a_client_that_reads_slowly_gets_everything(local_stack: LocalStack) -> None:
    client = local_stack.client(local_stack.add_tenant("acme"))
    text, pauses = "", 0
    for chunk in client.completions.create(
        model=MODEL, prompt="slow", seed=4, max_tokens=1500, stream=True, extra_body=FOREVER
    ):
        text += chunk.choices[0].text
        if pauses < 5:
            pauses += 1
            time.sleep(0.1)
    assert text == expected_text(local_stack.engines[0].submits[0])


def test_a_client_that_stops_reading_and_goes_is_booked_what_was_made_for_it(local_stack: LocalStack) -> None:
    key, [engine] = local_stack.add_tenant("acme"), local_stack.engines
    body = {"model": MODEL, "prompt": "deaf", "max_tokens": 300, "stream": True, **FOREVER}
    asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "app": local_stack.app,
    }  # fmt: skip

    async def ask() -> None:
        gone, sent = asyncio.Event(), 0

        async def receive() -> dict[str, Any]:
            if asked:
                return asked.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent > 3:  # as a server does whose client takes no more
                await gone.wait()

        task = asyncio.create_task(local_stack.app(scope, receive, send))
        while not engine.submits or engine.running:
            await asyncio.sleep(0.01)
        # What an engine gives comes in order: with another answer, all of this one is there.
        await completion(local_stack, key, "another")
        gone.set()
        await task

    local_stack.call(ask())
    booked: list[dict[str, Any]] = []

    def is_booked() -> bool:
        url, headers = f"{local_stack.url}/v1/usage/requests", {"Authorization": f"Bearer {key}"}
        found = httpx.get(url, headers=headers).json()["data"]
        booked[:] = [each for each in found if each["outcome"] == "disconnected"]
        return bool(booked)

    wait_until(is_booked, "the request is in the ledger")
    assert [each["output_tokens"] for each in booked] == [300]


async def completion(stack: LocalStack, key: str, prompt: str) -> None:
    """Asks for one token."""
    async with stack.async_client(key) as client:
        await client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, extra_body=FOREVER)


# ---- many at once -----------------------------------------------------------------------------------------


def test_interleaved_streams_never_mix(local_stack: LocalStack) -> None:
    client = local_stack.client(local_stack.add_tenant("acme"))
    found: dict[int, str] = {}

    def ask(seed: int) -> None:
        stream = client.completions.create(
            model=MODEL, prompt=f"client {seed}", seed=seed, max_tokens=100, stream=True, extra_body=FOREVER
        )
        found[seed] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {submit.seeds[0]: expected_text(submit) for submit in local_stack.engines[0].submits}
    assert found == expected and len(found) == 16


def test_redis_away_keeps_known_engines_and_adapters(
    local_stack: LocalStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    client = local_stack.client(local_stack.add_tenant("acme"))
    local_stack.add_adapter("acme", "sql", b"\xa1" * 32)
    client.completions.create(model="sql", prompt="x", max_tokens=1)

    async def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Redis is away")

    monkeypatch.setattr("adapters.registry.Registry.resolve", fail)
    monkeypatch.setattr("adapters.leases.EngineLeases.live", fail)
    wait_until(lambda: "Redis is away" in caplog.text, "the loss is logged")
    assert client.completions.create(model="sql", prompt="x", max_tokens=1).model == "sql@1"
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).model == MODEL
    monkeypatch.setattr(local_stack.app.state.services.redis, "ping", fail)
    ready = httpx.get(f"{local_stack.url}/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded"), "no reason to take gateways out"
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="unknown", prompt="x", max_tokens=1)
    assert caught.value.code == "registry_unavailable"
    time.sleep(1.2)
    assert caplog.text.count("keeping the engines known so far") == 1
