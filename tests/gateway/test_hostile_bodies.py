"""Bodies that nobody sends by mistake: each is refused in OpenAI's shape, or answered, soon, in bounded
memory, and while others are served.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway import bodies
from gateway.json_bounds import MAX_FIELDS, MAX_VALUES
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from tests.gateway.fake_engine import MODEL
from tests.gateway.hostile import (
    CHAT,
    MIB,
    TEXT,
    UPLOAD,
    chat,
    check_refused,
    connect,
    longest_turn,
    send_head,
)
from tests.gateway.local_stack import LocalStack
from tests.gateway.memory import peak, reset_peak


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + closing * depth


REFUSED_BODIES = {
    "nothing": b"",
    "blanks": b" \n\t" * 1000,
    "null": b"null",
    "a number": b"1",
    "a string": b'"x"',
    "a list": b"[]",
    "half": chat()[:-1],
    "more after it": chat() + b"{}",
    "a byte order mark": b"\xef\xbb\xbf" + chat(),
    "UTF-16": chat().decode().encode("utf-16"),
    "NUL bytes": b"\0" * 1000,
    "a comment": b"/* */" + chat(),
    "deep lists": nested(100_000),
    "deep objects": nested(50_000, b'{"a":', b"}"),
    "deep lists in a field": chat(messages=nested(2000)),
    "lists in lists as prompt": chat(stop=nested(500)),
    "deep content": chat(messages=[{"role": "user", "content": [[[[[["a"]]]]]]}]),
    "1e400": chat(temperature=b"1e400"),
    "-1e400": chat(temperature=b"-1e400"),
    "1e308": chat(temperature=b"1e308"),
    "a huge integer": chat(seed=b"1" + b"0" * 5000),
    "a huge limit": chat(max_tokens=b"1" + b"0" * 30),
    "a huge n": chat(n=10**18),
    "a megabyte of digits": chat(seed=b"9" * MIB),
    "NaN": chat(temperature=b"NaN"),
    "Infinity": chat(top_p=b"Infinity"),
    "-Infinity": chat(logit_bias=b'{"1":-Infinity}'),
    "a bias of 1e308": chat(logit_bias={"1": 1e308}),
    "a token id of 5000 digits": chat(logit_bias={"1" * 5000: 1}),
    "Arabic digits as a token id": chat(logit_bias={"١٢": 1}),
    "true as a number": chat(n=True),
    "a string as a number": chat(n="1"),
    "a float as an integer": chat(n=b"1.0"),
    "lone surrogate in text": chat(messages=b'[{"role":"user","content":"\\ud800"}]'),
    "reversed surrogates": chat(messages=b'[{"role":"user","content":"\\udc00\\ud800"}]'),
    "lone surrogate in a key": chat(metadata=b'{"\\udfff":"a"}'),
    "lone surrogate as a stop string": chat(stop=b'"\\ud83d"'),
    "surrogates in UTF-8": chat(stop=b'"\xed\xa0\x80"'),
    "overlong UTF-8": chat(stop=b'"\xc0\xaf"'),
    "cut UTF-8": chat(stop=b'"\xf0\x9f\x99"'),
    "half an escape": chat(stop=b'"\\u12"'),
    "a name of a megabyte": chat(**{"x" * MIB: 1}),
    "a model of a megabyte": chat(model="m" * MIB),
    "a model that is NUL": chat(model="\0"),
    "100,000 messages": chat(messages=[{"role": "user", "content": "a"}] * 100_000),
    "100,000 parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]),
    "100,000 fields": chat(**{f"f{index}": 1 for index in range(100_000)}),
    "a prompt of 7 MB": chat(messages=[{"role": "user", "content": "word " * (7 * MIB // 5)}]),
    "a prompt of 6 MB of escapes": chat(
        messages=b'[{"role":"user","content":"' + b"\\n" * (3 * MIB) + b'"}]'
    ),
    "lists by the million": chat(messages=b"[" + b"[]," * (2 * MIB) + b"1]"),
    "objects by the million": chat(messages=b"[" + b"{}," * (2 * MIB) + b"1]"),
    "numbers by the million": chat(stop_token_ids=b"[" + b"1.5," * MIB + b"1]"),
    "keys by the hundred thousand": chat(
        metadata=b"{" + b",".join(b'"%x":1' % index for index in range(400_000)) + b"}"
    ),
    "structure behind escaped quotes": chat(user='\\"' * 1000, messages=b"[" + b"[]," * MIB + b"1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_BODIES)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_body_that_is_no_request_is_refused(module_client: httpx.Client, path: str, name: str) -> None:
    check_refused(module_client.post(path, content=REFUSED_BODIES[name]), 400, 404)


@pytest.mark.parametrize(
    "body",
    [
        chat(seed=b'1,"seed":2'),
        chat(user="\0", metadata={"\0": "\0"}),
        chat(user="\U0010ffff\ufeff\u202e", messages=[{"role": "user", "content": "\0\ufffe\u2028"}]),
        chat(seed=-(2**63), top_k=-1, temperature=b"1E-400", min_p=b"-0.0"),
        chat(chat_template_kwargs=b'{"deep":' + nested(900) + b"}"),
        chat(user="[{" * MIB),
    ],
    ids=[
        "a field twice",
        "NUL characters",
        "odd characters",
        "numbers at the edges",
        "depth",
        "brackets in text",
    ],
)
def test_what_is_odd_but_right_is_answered(module_client: httpx.Client, body: bytes) -> None:
    answer = module_client.post(CHAT, content=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("count", "what", "status"),
    [(MAX_VALUES - 1000, b"1,", 400), (MAX_VALUES + 1, b"1,", 400), (MAX_FIELDS + 1, b"[1],", 400)],
)
def test_the_bound_on_structure_is_where_it_is_said_to_be(
    module_client: httpx.Client, count: int, what: bytes, status: int
) -> None:
    body = b'{"model":"%b","prompt":[%b1]}' % (MODEL.encode(), what * count)
    error = check_refused(module_client.post(TEXT, content=body), status)
    allowed = what == b"1," and count < MAX_VALUES
    assert error["code"] == ("context_length_exceeded" if allowed else "too_complex")


def test_a_prompt_that_is_too_long_says_both_numbers(module_client: httpx.Client) -> None:
    error = check_refused(module_client.post(TEXT, json={"model": MODEL, "prompt": [1] * 300}), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert "256 tokens" in error["message"] and "300 tokens" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/adapter-uploads"])
def test_more_than_a_body_may_be_is_413(module_client: httpx.Client, path: str) -> None:
    check_refused(module_client.post(path, content=chat(user="x" * 10 * MIB)), 413)
    check_refused(module_client.post(path, content=(b"x" * MIB for _ in range(10))), 413)


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "zstd", "nonsense"])
@pytest.mark.parametrize("path", [CHAT, UPLOAD, "/v1/adapter-pulls"])
def test_content_encodings_are_415(module_client: httpx.Client, path: str, encoding: str) -> None:
    answer = module_client.post(path, content=b"\x1f\x8b" * 100, headers={"content-encoding": encoding})
    assert check_refused(answer, 415)["code"] == "unsupported_content_encoding"


def test_a_body_in_chunks_without_a_length_is_read(module_client: httpx.Client) -> None:
    body = chat()
    answer = module_client.post(CHAT, content=(body[at : at + 1] for at in range(len(body))))
    assert answer.status_code == 200 and answer.request.headers["transfer-encoding"] == "chunked"


@pytest.mark.parametrize("path", [CHAT, "/v1/adapter-pulls"])
def test_a_body_that_does_not_come_is_408(
    module_client: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_S", 0.2)
    with connect(module_client) as connection:
        send_head(connection, module_client, path, "content-length: 1000")
        connection.sendall(b"{")
        assert b" 408 " in connection.recv(1000)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mistaken_requests(draw: st.DrawFn, kind: type[ChatRequest] | type[CompletionRequest]) -> bytes:
    """A request with some fields that hold anything, as bytes of which some may be wrong."""
    request: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    if kind is ChatRequest:
        request = json.loads(chat())
    names = draw(st.lists(st.sampled_from(sorted(kind.model_fields)), min_size=1, max_size=3))
    request |= {name: draw(JSON_VALUES) for name in names}
    raw = bytearray(json.dumps(request).encode())
    for at in draw(st.lists(st.integers(0, len(raw) - 1), max_size=1)):
        raw[at] = draw(st.integers(0, 255))
    return bytes(raw)


@pytest.mark.parametrize(("path", "kind"), [(CHAT, ChatRequest), (TEXT, CompletionRequest)])
def test_made_up_bodies(module_client: httpx.Client, path: str, kind: Any) -> None:
    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(body=mistaken_requests(kind))
    def check(body: bytes) -> None:
        answer = module_client.post(path, content=body)
        if answer.status_code != 200:
            check_refused(answer, 400, 404)

    check()


# ---- time and memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "a prompt of 7 MB",
        "a prompt of 6 MB of escapes",
        "lists by the million",
        "objects by the million",
        "keys by the hundred thousand",
        "100,000 messages",
        "a megabyte of digits",
    ],
)
def test_a_large_body_holds_nobody_up_and_takes_bounded_memory(
    module_stack: LocalStack, module_client: httpx.Client, name: str
) -> None:
    body = REFUSED_BODIES[name]
    module_client.get("/health")
    before = reset_peak()
    refused = partial(module_client.post, CHAT, content=body)
    assert longest_turn(module_stack, lambda: check_refused(refused(), 400)) < 0.1
    assert peak() - before < 100 * MIB
