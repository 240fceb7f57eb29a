"""Bodies of Messages that nobody sends by mistake: refused in Anthropic's shape, or answered, soon."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.schemas.messages import MessagesRequest
from tests.gateway.fake_engine import MODEL
from tests.gateway.hostile import MIB, chat, longest_turn
from tests.gateway.local_stack import LocalStack
from tests.gateway.test_hostile_bodies import JSON_VALUES, nested

PATHS = ("/v1/messages", "/v1/messages/count_tokens")


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def with_input(given: bytes) -> bytes:
    """A conversation with a call that has this input."""
    call = b'{"type":"tool_use","id":"a","name":"f","input":%b}' % given
    result = b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"a"}]}'
    return chat(messages=b'[{"role":"assistant","content":[%b]},%b]' % (call, result))


TEXT = {"type": "text", "text": "a"}
BODIES = {
    "half": chat()[:-1],
    "deep lists": nested(100_000),
    "a deep input": with_input(b'{"a":' * 1005 + b"1" + b"}" * 1005),
    "an input of megabytes": with_input(b'{"a":"%b"}' % (b"x" * 7 * MIB)),
    "100,000 blocks": chat(messages=user(*[TEXT] * 100_000)),
    "65,000 blocks": chat(messages=[{"role": "user", "content": [TEXT] * 1024}] * 15),
    "4,000 messages": chat(
        messages=[{"role": ("user", "assistant")[index % 2], "content": "a"} for index in range(4000)]
    ),
    "100,000 messages": chat(messages=[{"role": "user", "content": "a"}] * 100_000),
    "a prompt of 7 MB": chat(messages=[{"role": "user", "content": "word " * (7 * MIB // 5)}]),
    "a lone surrogate": chat(messages=b'[{"role":"user","content":"\\ud800"}]'),
    "a huge type": chat(messages=user({"type": "x" * MIB})),
    "a type that is none": chat(messages=user({"type": {"a": []}})),
    "a huge integer": chat(top_k=b"1" + b"0" * 5000),
    "a deep schema": chat(
        tools=[{"name": "f", "input_schema": {"type": "object"}}], output_config=nested(500)
    ),
}  # fmt: skip


def check_answered(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        return
    assert answer.status_code in (400, 404), answer.text[:300]
    body = answer.json()
    assert body["type"] == "error" and body["error"].keys() == {"type", "message"}
    assert 0 < len(body["error"]["message"]) < 1000 and body["request_id"]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", PATHS)
def test_a_body_is_refused_or_answered_and_holds_nobody_up(
    module_stack: LocalStack, module_client: httpx.Client, path: str, name: str
) -> None:
    module_client.get("/health")
    content = BODIES[name]
    assert longest_turn(module_stack, lambda: check_answered(module_client.post(path, content=content))) < 0.1


@st.composite
def mistaken_requests(draw: st.DrawFn) -> bytes:
    """A request with some fields, of it or of a block, that hold anything."""
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": user(TEXT)}
    names = draw(st.lists(st.sampled_from(sorted(MessagesRequest.model_fields)), max_size=2))
    request |= {name: draw(JSON_VALUES) for name in names}
    if "messages" not in names:
        kind = draw(st.sampled_from(("text", "tool_use", "tool_result", "thinking", "image")))
        fields = (
            "text",
            "id",
            "name",
            "input",
            "tool_use_id",
            "content",
            "is_error",
            "thinking",
            "signature",
        )
        given_fields = draw(st.lists(st.sampled_from(fields), max_size=4))
        block = {"type": kind} | {name: draw(JSON_VALUES) for name in given_fields}
        request["messages"] = [{"role": draw(st.sampled_from(("user", "assistant"))), "content": [block]}]
    return json.dumps(request).encode()


@pytest.mark.parametrize(("path", "examples"), [(PATHS[0], 60), (PATHS[1], 20)])
def test_made_up_bodies(module_client: httpx.Client, path: str, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(body=mistaken_requests())
    def check(body: bytes) -> None:
        check_answered(module_client.post(path, content=body))

    check()
