"""Forms, headers, and what is no HTTP at all: refused in OpenAI's shape, soon, and without a trace."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from gateway import http_protocol, uploads
from tests.gateway.hostile import CHAT, MIB, UPLOAD, chat, check_refused, connect, send_head
from tests.gateway.inhabited import adapter_files
from tests.gateway.local_stack import LocalStack
from tests.gateway.memory import peak, reset_peak

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
    module_stack: LocalStack, module_client: httpx.Client, name: str
) -> None:
    content_type, content = BAD_FORMS[name]
    check_refused(module_client.post(UPLOAD, content=content, headers={"content-type": content_type}))
    assert module_client.get(UPLOAD).json()["data"] == []
    assert list((module_stack.store / "staging").iterdir()) == []


def test_an_upload_that_pauses_for_too_long_is_408(
    module_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_PAUSE_S", 0.2)
    with connect(module_client) as connection:
        send_head(connection, module_client, UPLOAD, f"content-type: {FORM}", "content-length: 100000")
        connection.sendall(NAME)
        assert b" 408 " in connection.recv(1000)


# ---- headers, and what is no HTTP ------------------------------------------------------------------------


def exchanged(module_client: httpx.Client, data: bytes) -> tuple[int, bytes]:
    """Sends bytes on a connection of their own. Returns the status and the body of the first answer."""
    with connect(module_client) as connection:
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
def test_an_odd_key_is_401(module_client: httpx.Client, value: bytes) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: %b\r\n\r\n" % value
    status, body = exchanged(module_client, request)
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
def test_odd_http(module_client: httpx.Client, request_bytes: bytes, expected: int) -> None:
    status, body = exchanged(module_client, request_bytes)
    assert status == expected, (status, body)
    if expected != 200:
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_headers_that_never_end_are_431_in_bounded_memory(module_client: httpx.Client) -> None:
    before = reset_peak()
    with connect(module_client) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(3000):
                connection.sendall(b"x-a: " + b"a" * 32_000 + b"\r\n")
    assert peak() - before < 20 * MIB
    status, body = exchanged(module_client, b"GET /health HTTP/1.1\r\nx-a: " + b"a" * 100_000)
    assert (status, json.loads(body)["error"]["type"]) == (431, "invalid_request_error")


def test_a_head_that_begins_behind_a_body_is_counted_alone(module_client: httpx.Client) -> None:
    body = b"a" * (http_protocol.MAX_HEAD_BYTES + 1)
    first = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    second = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    with connect(module_client) as connection:
        connection.sendall(first + body + second)
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 404"), answer
        connection.sendall(b"connection: close\r\n\r\n")
        while more := connection.recv(1 << 16):
            answer += more
    assert b"HTTP/1.1 200" in answer


def test_headers_that_do_not_come_are_408(
    module_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEAD_S", 0.2)
    with connect(module_client) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx-a:")
        assert b" 408 " in connection.recv(1000)
    with connect(module_client) as connection:
        assert connection.recv(1000) == b"", "who says nothing is told nothing"


# ---- where a request ends, and whose it is ----------------------------------------------------------------


def test_a_body_behind_an_upgrade_is_no_request(module_client: httpx.Client) -> None:
    key = module_client.headers["authorization"]
    inner = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\n\r\n".encode()
    with connect(module_client) as connection:
        send_head(
            connection,
            module_client,
            CHAT,
            "connection: upgrade",
            "upgrade: h2c",
            f"content-length: {len(inner)}",
        )
        connection.sendall(inner)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"400", b"200"], answers
    assert b"invalid_json" in answers


def test_a_client_that_offers_http_2_is_answered_in_http_1(module_client: httpx.Client) -> None:
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
    for _ in range(2):
        answer = module_client.post(CHAT, content=chat(), headers=offer)
        assert answer.status_code == 200, answer.text


def test_a_key_in_a_trailer_is_none(module_client: httpx.Client) -> None:
    body = chat()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    key = f"authorization: {module_client.headers['authorization']}\r\n".encode()
    assert exchanged(module_client, head.encode() + b"\r\n" + chunks + key + b"\r\n")[0] == 401
    assert (
        exchanged(module_client, head.encode() + key + b"\r\n" + chunks + b"x-request-timeout: a\r\n\r\n")[0]
        == 200
    )


@pytest.mark.parametrize("begin", [b"0\r\n", b"0\r\nx-a: ", b"1;"])
@pytest.mark.parametrize("known", [True, False])
def test_what_never_ends_beside_a_body_takes_bounded_memory(
    module_client: httpx.Client, begin: bytes, known: bool
) -> None:
    before = reset_peak()
    key = f"authorization: {module_client.headers['authorization']}\r\n" if known else ""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{key}transfer-encoding: chunked\r\n\r\n"
    with connect(module_client) as connection:
        connection.sendall(head.encode() + begin)
        with pytest.raises(OSError):
            for _ in range(1000):
                connection.sendall(b"x-a: b\r\n" * 8000 if begin == b"0\r\n" else b"a" * 64_000)
    assert peak() - before < 20 * MIB


def test_a_connection_is_not_held_open_behind_a_refusal(
    module_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEAD_S", 1.0)
    with connect(module_client) as connection:
        connection.settimeout(60)
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        connection.sendall(b"a")
        assert connection.recv(65536) == b""


def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection(module_client: httpx.Client) -> None:
    body, key = chat(stream=True), module_client.headers["authorization"]
    head = f"POST {CHAT} HTTP/1.0\r\nhost: x\r\nauthorization: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    with connect(module_client) as connection:
        connection.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head_sent, _, stream = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head_sent.lower() and b"connection: close" in head_sent
    assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", [f"{CHAT}/", "/health/", "/docs/", "/admin/tenants/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nobody_is_sent_where_the_host_header_says(
    module_client: httpx.Client, method: str, path: str
) -> None:
    answer = module_client.request(method, path, headers={"host": "evil.example"})
    assert check_refused(answer, 404) and "evil.example" not in f"{answer.headers}{answer.text}"
