"""Errors of Messages: Anthropic's shape, types and statuses, as its client's exceptions."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from redis.asyncio import Redis

from gateway.generation import Piece
from gateway.keys import Keys
from gateway.limits import RateLimits
from gateway.messages.answer import MessageFormat
from gateway.tenants import Tenants
from protos import engine_pb2 as pb
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.local_stack import LocalStack

Client = anthropic.Anthropic
QUESTION: Any = [{"role": "user", "content": "a"}]
BODY: Any = {"model": "plain", "messages": QUESTION, "max_tokens": 4}


def is_anthropic_s(answer: Any, kind: str) -> str:
    """Checks an error's body and headers. Returns its message."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return body["error"]["message"]


USER_BLOCKS = [
    ({"type": "image", "source": {"type": "url", "url": "http://x"}}, r"content\[0\]: .*'image'"),
    ({"type": "document", "source": {}}, "'document'"),
    ({"type": "tool_use", "id": "a", "name": "b", "input": {}}, "'user' can have no 'tool_use'"),
    ({"type": "tool_result", "tool_use_id": "a"}, "can have no 'tool_result'"),
    ({"type": "text"}, r"messages\[0\]\.content\[0\]\.text"),
    ({}, r"messages\[0\]\.content\[0\]\.type"),
]
CALL = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
TOOL = {"name": "b", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        *(({"messages": [{"role": "user", "content": [block]}]}, match) for block, match in USER_BLOCKS),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "without content"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "empty prompt"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "So "}]}, "white space"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": [CALL]}, *QUESTION]}, "right after it: a"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": [CALL]}]}, "right after it: a"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"foo": 1}, "foo"),
        ({"mcp_servers": [{}]}, "'mcp_servers' is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\]: .*'bash_20250124'"),
        ({"tools": [TOOL]}, "does not show tools"),
        ({"tools": [TOOL, TOOL]}, "'b' is there more than once"),
        ({"tool_choice": {"type": "any"}}, "needs 'tools'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "c"}}, "'c' is not among"),
        ({"thinking": {"type": "enabled"}}, r"thinking\.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "greater than"),
        ({"max_tokens": 5000}, r"maximum context length is 2048 .* 5020 tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_succeed_is_a_bad_request(
    client: Client, fields: dict[str, Any], match: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=match) as caught:
        client.messages.create(**{**BODY, "stream": stream}, extra_body=fields)
    is_anthropic_s(caught.value.response, "invalid_request_error")
    assert caught.value.request_id == caught.value.response.json()["request_id"]


def test_a_schema_that_cannot_be_held_to_is_named_as_the_client_does(client: Client) -> None:
    tool: Any = {"name": "b", "strict": True, "input_schema": {"type": "object", "not": {}}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema"):
        client.messages.create(**{**BODY, "model": "hermes"}, tools=[tool])


def test_keys(messages_stack: LocalStack, client: Client, key: str) -> None:
    def ask(**given: Any) -> Any:
        with anthropic.Anthropic(base_url=messages_stack.url, max_retries=0, **given) as own:
            return own.messages.create(**BODY)

    assert ask(api_key=None, auth_token=key).type == "message"
    for wrong in ({"api_key": f"{key[:-3]}abc"}, {"auth_token": "lpx_nobody_nothing", "api_key": None}):
        with pytest.raises(anthropic.AuthenticationError) as caught:
            ask(**wrong)
        is_anthropic_s(caught.value.response, "authentication_error")
    headers = {"x-api-key": key, "authorization": "Bearer lpx_nobody_nothing"}
    answer = httpx.post(f"{messages_stack.url}/v1/messages", json=BODY, headers=headers)
    assert answer.status_code == 401, "of two keys the one in Authorization counts"
    assert "x-api-key" in is_anthropic_s(
        httpx.post(f"{messages_stack.url}/v1/messages", json=BODY), "authentication_error"
    )
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    answer = httpx.post(f"{messages_stack.url}/v1/messages/count_tokens", json=BODY, headers=headers)
    assert answer.status_code == 400 and "max_tokens" in is_anthropic_s(answer, "invalid_request_error")


def test_a_key_without_the_scope(messages_stack: LocalStack) -> None:
    async def make() -> str:
        async with Redis.from_url(messages_stack.redis_url) as redis:
            await Tenants(redis).create("narrow", tenant_id="narrow")
            return (await Keys(redis).create("narrow", scopes=frozenset({"adapters"})))[1]

    key = messages_stack.call(make())
    with (
        anthropic.Anthropic(base_url=messages_stack.url, api_key=key, max_retries=0) as own,
        pytest.raises(anthropic.PermissionDeniedError) as caught,
    ):
        own.messages.create(**BODY)
    is_anthropic_s(caught.value.response, "permission_error")


def test_what_does_not_exist(messages_stack: LocalStack, client: Client, key: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'nothing' does not exist") as caught:
        client.messages.create(**{**BODY, "model": "nothing"})
    is_anthropic_s(caught.value.response, "not_found_error")
    with httpx.Client(base_url=messages_stack.url, headers={"x-api-key": key}) as http:
        is_anthropic_s(http.post("/v1/messages/batches", json={}), "not_found_error")
        answer = http.get("/v1/messages")
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        is_anthropic_s(answer, "invalid_request_error")
        assert http.post("/v1/messagesx", json={}).json().keys() == {"error"}, "and nowhere else"


def test_bodies_that_are_not_read(messages_stack: LocalStack, key: str) -> None:
    with httpx.Client(base_url=messages_stack.url, headers={"x-api-key": key}) as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = http.post(path, content=b"{")
            assert answer.status_code == 400 and is_anthropic_s(answer, "invalid_request_error")
            answer = http.post(path, content=b" " * (8 * 1024 * 1024 + 1))
            assert answer.status_code == 413 and is_anthropic_s(answer, "request_too_large")
            answer = http.post(path, content=b"x", headers={"content-encoding": "gzip"})
            assert answer.status_code == 415 and is_anthropic_s(answer, "invalid_request_error")


def test_a_limit(messages_stack: LocalStack) -> None:
    async def make() -> str:
        async with Redis.from_url(messages_stack.redis_url) as redis:
            await Tenants(redis).create("few", tenant_id="few")
            return (await Keys(redis).create("few", limits=RateLimits(requests_per_minute=1)))[1]

    key = messages_stack.call(make())
    with anthropic.Anthropic(base_url=messages_stack.url, api_key=key, max_retries=0) as own:
        raw = own.messages.with_raw_response.create(**BODY)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        own.messages.count_tokens(model="plain", messages=QUESTION)
        with pytest.raises(anthropic.RateLimitError) as caught:
            own.messages.create(**BODY)
    assert "requests_per_minute" in is_anthropic_s(caught.value.response, "rate_limit_error")
    assert int(caught.value.response.headers["retry-after"]) > 0


def test_an_engine_without_room_is_overloaded(client: Client, engines: dict[str, FakeEngine]) -> None:
    engines["plain"].refusing = True
    engines["plain"].refusal = pb.REFUSAL_QUEUE_FULL
    try:
        with pytest.raises(anthropic.InternalServerError) as caught:
            client.messages.create(**BODY)
    finally:
        engines["plain"].refusing = False
    assert caught.value.status_code == 529
    is_anthropic_s(caught.value.response, "overloaded_error")
    assert "retry-after" in caught.value.response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline(client: Client, stream: bool) -> None:
    with pytest.raises(anthropic.InternalServerError) as caught:
        client.messages.create(**BODY, stream=stream, extra_headers={"X-Request-Timeout": "0.000001"})
    assert caught.value.status_code == 504
    is_anthropic_s(caught.value.response, "timeout_error")


def test_an_error_within_a_stream_is_its_last_event(
    client: Client, engines: dict[str, FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, engine = MessageFormat.chunk, engines["plain"]

    def failing(form: MessageFormat, piece: Piece) -> bytes:
        # Pieces that come faster than they are sent become one: only the last is sure to be there.
        if piece.finish_reason is not None:
            raise RuntimeError("secret detail")
        return chunk(form, piece)

    monkeypatch.setattr(MessageFormat, "chunk", failing)
    monkeypatch.setattr(engine, "holds_at", 5)
    with client.messages.with_streaming_response.create(**{**BODY, "max_tokens": 99}, stream=True) as raw:
        pieces = raw.iter_text()
        text = next(pieces)  # so the stream has begun before its last piece is made
        engine.holds_at = None
        text += "".join(pieces)
    *_, last = text.removesuffix("\n\n").split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error" and '"type":"api_error"' in data and "secret" not in data
    assert raw.headers["request-id"] in data and "[DONE]" not in text
    engine.holds_at = 5
    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        for _ in client.messages.create(**{**BODY, "max_tokens": 99}, stream=True):
            engine.holds_at = None
