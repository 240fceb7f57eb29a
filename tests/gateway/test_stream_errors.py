"""A stream that does not end well: its engine fails, there is a bug, or the client goes."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.api.chat import ChatFormat
from gateway.generation import Piece
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.local_stack import LocalStack, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture
def stack(valkey_url: str, tmp_path: Path) -> Iterator[LocalStack]:
    """A gateway that gives up at once when its engine is lost, before one that stops short of the end."""
    engine = FakeEngine("engine-1", valkey_url, holds_at=20)
    with LocalStack(valkey_url, tmp_path / "store", [engine], resume_timeout_s=0).ready() as stack:
        yield stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {stack.add_tenant('acme')}"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=30) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a"}]
    return {"model": MODEL, "messages": messages, "ignore_eos": True, "stream": True, "seed": 1, **fields}


def events(answer: httpx.Response) -> Iterator[str]:
    """The data of each event, as it comes."""
    for line in answer.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield line.removeprefix("data: ")


def ends_with_error(got: list[str]) -> dict[str, Any]:
    """Checks that text came, then an error event, then the mark of the end. Returns the error."""
    *chunks, last, end = got
    assert any(has_text(data) for data in chunks) and end == "[DONE]"
    assert all("choices" in json.loads(data) for data in chunks)
    error = json.loads(last)
    assert set(error) == {"error"} and set(error["error"]) == {"message", "type", "param", "code"}
    return error["error"]


def has_text(data: str) -> bool:
    return bool(json.loads(data)["choices"][0]["delta"].get("content"))


def test_an_engine_that_is_lost_is_an_error_event(stack: LocalStack, client: httpx.Client) -> None:
    got: list[str] = []
    stopped = False
    with client.stream("POST", CHAT, json=body()) as answer:
        assert answer.status_code == 200
        for data in events(answer):
            got.append(data)
            if '"choices"' in data and has_text(data) and not stopped:
                stopped = True
                stack.call(stack.engines[0].stop())
    error = ends_with_error(got)
    assert error["type"] == "server_error" and error["code"] == "engine_unavailable"
    stack.call(stack.engines[0].start())


def test_a_bug_is_an_error_event_without_internals(
    stack: LocalStack,
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunk = ChatFormat.chunk

    def failing(form: ChatFormat, piece: Piece) -> bytes:
        # Pieces that come faster than they are sent become one: only the last is sure to be there.
        if piece.finish_reason is not None:
            raise RuntimeError("secret detail")
        return chunk(form, piece)

    monkeypatch.setattr(ChatFormat, "chunk", failing)
    got: list[str] = []
    with client.stream("POST", CHAT, json=body(max_tokens=60)) as answer:
        for data in events(answer):
            got.append(data)
            if '"choices"' in data and has_text(data):
                stack.engines[0].holds_at = None
        error = ends_with_error(got)
        assert error["type"] == "server_error" and "secret" not in error["message"]
    assert caplog.text.count("RuntimeError: secret detail") == 1
    assert answer.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_is_logged_once(
    stack: LocalStack, client: httpx.Client, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    engine = stack.engines[0]
    if stream:
        with client.stream("POST", CHAT, json=body()) as answer:
            next(answer.iter_lines())
    else:
        ask = http.client.HTTPConnection(client.base_url.host, client.base_url.port)
        headers = {"authorization": client.headers["authorization"], "content-type": "application/json"}
        ask.request("POST", CHAT, json.dumps(body(stream=False)), headers)
        wait_until(lambda: bool(engine.running), "the request runs")
        ask.close()
    wait_until(lambda: not engine.running and "went away" in caplog.text, "the request has ended")
    lines = [record for record in caplog.records if record.name.startswith(("gateway", "uvicorn"))]
    said = [record.getMessage() for record in lines if "went away" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("request req_")
    assert not [record for record in lines if record.levelno > logging.INFO]
