"""kill -9 of each process in turn: what the others say, what goes on, and what is there afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.processes import BASE, EXACT, FOREVER, JSON, PIRATE, START_S, Service, Stack, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = "One day a small boat"
GREEDY: dict[str, Any] = {"model": "pirate", "prompt": PROMPT, "temperature": 0}
SEEDED: dict[str, Any] = {"model": BASE, "prompt": PROMPT, "temperature": 0.8, "seed": 11}
KINDS = (GREEDY, SEEDED)
TOKENS = 80


@dataclass(frozen=True)
class Scene:
    """A stack of its own, and a client of a tenant that uploaded `pirate` and `json` before any outage."""

    stack: Stack
    client: OpenAI

    def complete(self, model: str, max_tokens: int = 4) -> str:
        answer = self.client.completions.create(
            model=model, prompt=PROMPT, temperature=0, max_tokens=max_tokens, extra_body=FOREVER
        )
        return answer.choices[0].text


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    # A machine that is busy may take longer than the default to start an engine again.
    stack = Stack(
        tmp_path_factory.mktemp("outages"),
        [*EXACT, "--max-num-seqs", "8", "--max-model-len", "1024", "--num-gpu-blocks-override", "128"],
        LORAPLEX_RESUME_TIMEOUT_S=str(START_S),
    )
    try:
        stack.start()
        key = stack.create_tenant("acme")
        stack.upload(PIRATE, "pirate", key)
        stack.upload(JSON, "json", key)
        yield Scene(stack, stack.client(key))
    finally:
        stack.stop()
    stack.assert_calm()


class Reader:
    """Reads a stream in a thread of its own."""

    def __init__(self, client: OpenAI, arguments: dict[str, Any]) -> None:
        self.text = ""
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(client, arguments))
        self._thread.start()

    def _read(self, client: OpenAI, arguments: dict[str, Any]) -> None:
        try:
            stream = client.completions.create(
                stream=True, max_tokens=TOKENS, extra_body=FOREVER, **arguments
            )
            for chunk in stream:
                self.text += chunk.choices[0].text
        except Exception as error:
            self.error = error

    @property
    def is_reading(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> str:
        self._thread.join(timeout=START_S)
        assert not self.is_reading
        assert self.error is None, self.error
        return self.text


@pytest.fixture(scope="module")
def expected(scene: Scene) -> list[str]:
    """The streams' texts when nothing happens."""
    return [reader.finish() for reader in [Reader(scene.client, kind) for kind in KINDS]]


@contextmanager
def half_way(scene: Scene, expected: Sequence[str]) -> Iterator[list[Reader]]:
    """Streams that have come some way and have some to go; the engine waits while the block runs, so that it
    is so there. A test that a slow machine keeps from that moment tries again.
    """
    for _ in range(10):
        readers = [Reader(scene.client, kind) for kind in KINDS]
        wait_until(lambda: all(len(each.text) > 40 for each in readers), "both streams run")  # noqa: B023
        with scene.stack.engine.paused():
            texts = zip(readers, expected, strict=True)
            if all(len(reader.text) < len(whole) - 40 for reader, whole in texts):
                yield readers
                return
        for reader in readers:
            reader.finish()
    raise AssertionError("streams end before they can be looked at")


def assert_one_line(service: Service, words: Sequence[str], since: int) -> None:
    """The service said one line with one of these words, and nothing that looks like a crash."""
    assert len(service.lines(*words, since=since)) == 1, service.lines(since=since)
    assert not service.lines("Traceback", "ERROR", "  File ", since=since), service.lines(since=since)


def test_valkey_is_killed_and_started_again(scene: Scene, expected: list[str]) -> None:
    stack = scene.stack
    gateway_from, engine_from = stack.gateway.log_end(), stack.engine.log_end()
    with half_way(scene, expected) as readers:
        stack.valkey.kill()
    for service, since in ((stack.gateway, gateway_from), (stack.engine, engine_from)):
        wait_until(lambda: service.lines("Redis is away", since=since), "it says so")  # noqa: B023
    assert scene.complete("pirate"), "a known key and a known adapter go on"
    assert scene.complete(BASE)
    with pytest.raises(openai.InternalServerError) as caught:
        scene.client.completions.create(model="unknown", prompt="x")
    assert caught.value.code == "registry_unavailable"
    assert [reader.finish() for reader in readers] == expected, "streams that ran did not notice"
    assert_one_line(stack.gateway, ["Redis is away"], gateway_from)
    assert_one_line(stack.engine, ["Redis is away"], engine_from)

    stack.valkey.start()
    for service, since in ((stack.gateway, gateway_from), (stack.engine, engine_from)):
        wait_until(lambda: service.lines("Redis is back", since=since), "it says so")  # noqa: B023
    assert_one_line(stack.gateway, ["Redis is back"], gateway_from)
    assert_one_line(stack.engine, ["Redis is back"], engine_from)
    assert not stack.gateway.lines("lost engine", since=gateway_from)
    assert scene.complete("json") != scene.complete(BASE), "an adapter not used before is still there"
    new = stack.client(stack.create_tenant("after-valkey"))
    assert new.completions.create(model=BASE, prompt="x", max_tokens=1).choices


def test_the_engine_is_killed_and_its_streams_go_on_when_it_is_started_again(
    scene: Scene, expected: list[str]
) -> None:
    stack = scene.stack
    since = stack.gateway.log_end()
    with half_way(scene, expected) as readers:
        stack.engine.kill()
    wait_until(lambda: stack.gateway.lines("lost engine", since=since), "the gateway says so")
    before = [reader.text for reader in readers]
    assert stack.gateway.lines("2 sequences in flight", since=since)
    stack.engine.start()
    assert [reader.finish() for reader in readers] == expected
    assert all(text < whole for text, whole in zip(before, expected, strict=True)), "they had some to go"
    assert_one_line(stack.gateway, ["lost engine", "cannot reach engine"], since)
    assert_one_line(stack.gateway, ["linked to engine"], since)
    assert scene.complete("json") != scene.complete(BASE)


def test_the_gateway_is_killed_and_started_again(scene: Scene, expected: list[str]) -> None:
    stack = scene.stack
    answer = scene.complete("json", max_tokens=16)
    since = stack.engine.log_end()
    with half_way(scene, expected) as readers:
        stack.gateway.kill()
    for reader in readers:
        wait_until(lambda: not reader.is_reading, "the connection breaks")  # noqa: B023
        assert isinstance(reader.error, Exception)
    wait_until(lambda: stack.engine.lines("link", since=since), "the engine says so")
    assert_one_line(stack.engine, ["has ended"], since)
    assert not stack.engine.lines("Redis", since=since)
    stack.gateway.start()
    assert scene.complete("json", max_tokens=16) == answer
    assert scene.client.models.retrieve("pirate").id == "pirate"
    assert_one_line(stack.engine, ["has ended"], since)
    assert_one_line(stack.engine, ["a link from"], since)
