"""What the gateway tells engines of adapters ahead of requests, and what it shows of adapters on engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from adapters.leases import EngineLease
from gateway.engine_metrics import EngineMetrics
from gateway.metrics import Metrics
from protos import engine_pb2 as pb
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.local_stack import LocalStack, wait_until

COLD, WARM = b"\x01" * 32, b"\x02" * 32


@pytest.fixture
def stack(valkey_url: str, tmp_path: Path) -> Iterator[LocalStack]:
    engine = FakeEngine("engine-1", valkey_url, residency={WARM.hex(): "host"})
    with LocalStack(valkey_url, tmp_path / "store", [engine]).ready() as stack:
        yield stack


def test_a_cold_adapter_is_announced_before_its_request_and_a_warm_one_is_not(stack: LocalStack) -> None:
    key = stack.add_tenant("acme")
    for name, digest in (("cold", COLD), ("warm", WARM)):
        stack.add_adapter("acme", name, digest)
    client = stack.client(key)
    for model in (MODEL, "warm", "cold"):
        client.completions.create(model=model, prompt="hello", max_tokens=2)
    (engine,) = stack.engines
    assert engine.announced == [COLD]
    assert [submit.adapter_digest for submit in engine.submits] == [b"", WARM, COLD]


def test_a_cold_adapter_of_many_requests_is_not_announced_with_each(stack: LocalStack) -> None:
    client = stack.client(stack.add_tenant("acme"))
    stack.add_adapter("acme", "cold", COLD)
    for _ in range(20):
        client.completions.create(model="cold", prompt="hello", max_tokens=1)
    (engine,) = stack.engines
    assert 1 <= len(engine.announced) < 20, "leases say every second what is in memory"


def test_show_says_where_an_adapter_is_and_what_it_has_been_through(stack: LocalStack) -> None:
    key = stack.add_tenant("acme")
    stack.add_adapter("acme", "warm", WARM)
    stack.add_adapter("acme", "cold", COLD)
    stack.engines[0].states[WARM] = pb.AdapterState(
        residency=pb.RESIDENCY_DEVICE, pinned=True, hits=7, loads=3, load_seconds=0.0212, evictions=2,
        hits_device=5, misses=4,
    )  # fmt: skip
    headers = {"Authorization": f"Bearer {key}"}
    shown = httpx.get(f"{stack.url}/v1/adapters/warm", headers=headers).json()
    assert shown["engines"] == {
        "engine-1": {
            "tier": "device", "pinned": True, "hits": 7, "loads": 3, "load_seconds": 0.0212, "evictions": 2,
            "requests": {"device": 5, "host": 2, "none": 4},
        }
    }  # fmt: skip
    assert httpx.get(f"{stack.url}/v1/adapters/cold", headers=headers).json()["engines"] == {}
    stack.call(stack.engines[0].stop())
    wait_until(lambda: httpx.get(f"{stack.url}/ready").status_code == 503, "the engine is gone")
    assert httpx.get(f"{stack.url}/v1/adapters/warm", headers=headers).json()["engines"] == {}


def test_metrics_show_each_engines_adapters() -> None:
    lease = EngineLease(
        "engine-ab", "127.0.0.1:1", MODEL, bytes(32), 64,
        residency={"aa": "device", "bb": "device", "cc": "host"}, running=3, waiting=4,
        adapters={"requests_device": 5, "loads_store": 2, "load_seconds_store": 0.5, "num_pages": 8},
    )  # fmt: skip
    text = Metrics(EngineMetrics(lambda: [lease])).render().decode()
    for line in (
        'loraplex_engine_adapter_requests_total{engine="engine-ab",tier="device"} 5.0',
        'loraplex_engine_adapter_loads_total{engine="engine-ab",source="store"} 2.0',
        'loraplex_engine_adapter_load_seconds_total{engine="engine-ab",source="store"} 0.5',
        'loraplex_engine_adapter_evictions_total{engine="engine-ab",tier="host"} 0.0',
        'loraplex_engine_rank_pages{engine="engine-ab",state="all"} 8.0',
        'loraplex_engine_adapters{engine="engine-ab",tier="device"} 2.0',
        'loraplex_engine_sequences{engine="engine-ab",state="waiting"} 4.0',
    ):
        assert line in text.splitlines()
    assert "127.0.0.1" not in text
