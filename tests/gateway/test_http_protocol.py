"""What a connection makes of bytes, however they are cut: which requests there are, and when it ends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from gateway import http_protocol
from gateway.http_protocol import MAX_HEAD_BYTES, BoundedHttp

INNER = b"GET /inner HTTP/1.1\r\nhost: x\r\n\r\n"
"""A body that would be a request, were it taken for one."""
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.unread = 0

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Connection:
    """A connection to an app that answers with the request that it saw: one for `/early` before its body
    came, one for `/stream` in two pieces, of which the second comes once `may_end` is set.
    """

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self._transport = Transport()
        config = uvicorn.Config(self._app, interface="asgi3", log_config=None, timeout_keep_alive=3600)
        self._protocol = BoundedHttp(config, ServerState(), {})
        self._protocol.connection_made(self._transport)

    async def send(self, *pieces: bytes) -> None:
        """Has pieces arrive, each by itself, until the connection is closed; returns when all is done."""
        for piece in pieces:
            self.receive(piece)
            await _turns(2)
        await _turns(30)

    def receive(self, piece: bytes) -> None:
        """Has a piece arrive, in no time."""
        if not self.is_closed:
            self._protocol.data_received(piece)

    def take_clock(self) -> Clock:
        """From now on its timers fire when they are told to."""
        clock = Clock()
        self._protocol.loop = clock  # type: ignore[assignment]
        return clock

    def fill(self, unread: int) -> None:
        """So much is written and not read, which fills the buffers."""
        self._transport.unread = unread
        self._protocol.pause_writing()

    def read(self, count: int) -> None:
        """The client reads, and leaves something."""
        self._transport.unread -= count

    def empty(self) -> None:
        """The client has read all."""
        self._transport.unread = 0
        self._protocol.resume_writing()

    @property
    def is_closed(self) -> bool:
        return self._transport.closed

    @property
    def raw(self) -> bytes:
        return self._transport.written

    @property
    def answers(self) -> list[tuple[int, Any]]:
        """The status and the JSON of each answer."""
        found: list[tuple[int, Any]] = []
        rest = self.raw
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            size = int(length[1])
            found.append((int(head.split()[1]), json.loads(rest[:size])))
            rest = rest[size:]
        return found

    @property
    def seen(self) -> list[tuple[str, str, bytes]]:
        """The method, the path and the body of each request, as the app saw it."""
        assert all(status == 200 for status, _ in self.answers), self.answers
        return [(seen["method"], seen["path"], seen["body"].encode()) for _, seen in self.answers]

    def close(self) -> None:
        self._protocol.connection_lost(None)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
        seen = {"method": scope["method"], "path": scope["path"], "body": body.decode(), "headers": headers}
        answer, length = json.dumps(seen).encode(), []
        if scope["path"] != "/stream":
            length = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            await self.may_end.wait()
            answer = b"ended"
        await send({"type": "http.response.body", "body": answer, "more_body": False})


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[], Connection]]:
    made: list[Connection] = []

    def make() -> Connection:
        made.append(Connection())
        return made[-1]

    yield make
    for connection in made:
        connection.may_end.set()
        connection.close()
    await _turns(5)


Connect = Callable[[], Connection]


def _cuts(data: bytes) -> Iterable[list[bytes]]:
    """All ways to cut it in two, and each byte by itself."""
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]
    yield [data]
    yield [data[at : at + 1] for at in range(len(data))]


# ---- requests that ask for another protocol --------------------------------------------------------------

H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
WEBSOCKET = b"Connection: upgrade\r\nUpgrade: websocket\r\nsec-websocket-key: x\r\n"


@pytest.mark.parametrize("asks", [H2C, WEBSOCKET])
async def test_a_body_is_a_body_also_where_another_protocol_is_asked_for(
    connect: Connect, asks: bytes
) -> None:
    sized = b"POST /a HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (asks, len(INNER), INNER)
    for pieces in _cuts(sized + NEXT):
        connection = connect()
        await connection.send(*pieces)
        assert connection.seen == [("POST", "/a", INNER), ("GET", "/next", b"")], pieces
        assert not connection.is_closed

    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)
    chunked = b"POST /a HTTP/1.1\r\n%btransfer-encoding: chunked\r\n\r\n%b" % (asks, chunk)
    connection = connect()
    await connection.send(chunked + NEXT)
    assert connection.seen == [("POST", "/a", INNER), ("GET", "/next", b"")]


async def test_requests_behind_one_that_asks_for_another_protocol_are_answered(connect: Connect) -> None:
    one = b"GET /a HTTP/1.1\r\nhost: x\r\n%b\r\n" % H2C
    for pieces in _cuts(one + NEXT):
        connection = connect()
        await connection.send(*pieces)
        assert [path for _, path, _ in connection.seen] == ["/a", "/next"], pieces
    connection = connect()
    await connection.send(*[one * 40] * 2)
    await _wait_until(lambda: len(connection.answers) == 80)


async def test_all_other_headers_stay(connect: Connect) -> None:
    head = b"GET / HTTP/1.1\r\nHost:  x \r\nx-empty:\r\nx-two: 1\r\nX-Two: 2:3\r\n%bX-Last: \xc3\xa4\r\n\r\n"
    connection = connect()
    await connection.send(head % WEBSOCKET, head % WEBSOCKET.replace(b"Upgrade: websocket\r\n", b""))
    (_, with_it), (_, without) = connection.answers
    assert with_it == without
    assert ["x-two", "2:3"] in with_it["headers"] and ["x-empty", ""] in with_it["headers"]


async def test_close_beside_upgrade_closes(connect: Connect) -> None:
    for pieces in _cuts(b"GET /a HTTP/1.1\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n\r\n" + NEXT):
        connection = connect()
        await connection.send(*pieces)
        assert connection.seen == [("GET", "/a", b"")] and connection.is_closed
        assert b"connection: close" in connection.raw


@pytest.mark.parametrize("target", [b"x:80", b"/a"])
@pytest.mark.parametrize("more", [b"", H2C, b"content-length: 3\r\n"])
async def test_a_tunnel_is_refused(connect: Connect, target: bytes, more: bytes) -> None:
    for pieces in _cuts(b"CONNECT %b HTTP/1.1\r\nhost: x:80\r\n%b\r\n%b" % (target, more, NEXT)):
        connection = connect()
        await connection.send(*pieces)
        [(status, body)] = connection.answers
        assert status == 400 and "CONNECT" in body["error"]["message"] and connection.is_closed


# ---- what comes beside a body ----------------------------------------------------------------------------


async def test_trailers_are_no_headers(connect: Connect) -> None:
    trailers = b"authorization: Bearer a\r\nx-empty:\r\nexpect: 100-continue\r\n\r\n"
    for pieces in _cuts(CHUNKED + b"1\r\na\r\n0\r\n" + trailers + NEXT):
        connection = connect()
        await connection.send(*pieces)
        assert connection.seen == [("POST", "/", b"a"), ("GET", "/next", b"")], pieces
        first, second = [dict(seen["headers"]) for _, seen in connection.answers]
        assert first == {"host": "x", "transfer-encoding": "chunked"} and second == {"host": "x"}


ENDLESS = {
    "trailers": (b"0\r\n", b"x-a: b\r\n" * 1000),
    "one trailer": (b"0\r\nx-a: ", b"a" * 8000),
    "an extension": (b"1;", b"a" * 8000),
    "extensions without a name": (b"1", b";" * 8000),
    "leading zeros": (b"", b"0" * 8000),
}


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("body", [b"", b"5\r\nhello\r\n"])
async def test_what_never_ends_beside_a_body_is_431(connect: Connect, what: str, body: bytes) -> None:
    begin, more = ENDLESS[what]
    connection = connect()
    await connection.send(CHUNKED + body + begin, *[more] * (MAX_HEAD_BYTES // 8000 - 1))
    assert not connection.is_closed
    await connection.send(*[more] * 3)
    assert connection.is_closed
    [(status, answer)] = connection.answers
    assert status == 431 and "trailers" in answer["error"]["message"]


async def test_what_never_ends_behind_an_answer_ends_the_connection(connect: Connect) -> None:
    connection = connect()
    early = CHUNKED.replace(b" / ", b" /early ")
    await connection.send(early + b"0\r\n", *[b"x-a: b\r\n" * 1000] * 9)
    assert connection.is_closed
    assert connection.seen == [("POST", "/early", b"")], "no second answer to one request"
    connection = connect()
    await connection.send(NEXT, *[b"\r\n" * 4000] * 9)
    assert connection.is_closed and connection.seen == [("GET", "/next", b"")]


async def test_pieces_of_a_body_are_not_counted_as_what_is_beside_it(connect: Connect) -> None:
    connection = connect()
    large = b"a" * MAX_HEAD_BYTES
    await connection.send(
        b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (4 * len(large)), *[large] * 4, NEXT
    )
    assert connection.seen == [("POST", "/", large * 4), ("GET", "/next", b"")]
    connection = connect()
    chunk = b"%x;b=c\r\n%b\r\n" % (10, b"a" * 10)
    await connection.send(CHUNKED, *[chunk * 1000] * 20, b"0\r\n", b"x-a: b\r\n" * 1000, b"\r\n", NEXT)
    assert connection.seen == [("POST", "/", b"a" * 200_000), ("GET", "/next", b"")]


# ---- how long ---------------------------------------------------------------------------------------------

UNREAD = b"POST /early HTTP/1.1\r\ncontent-length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "more"),
    [
        (UNREAD, b"x"),
        (CHUNKED.replace(b" / ", b" /early "), b"1\r\n"),
        (CHUNKED.replace(b" / ", b" /early ") + b"0\r\n", b"a"),
        (NEXT, b"\r\n"),
    ],
)
async def test_nobody_holds_a_connection_on_which_all_is_answered(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, request_bytes: bytes, more: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEAD_S", 0.2)
    once, again_and_again = connect(), connect()
    for connection in (once, again_and_again):
        await connection.send(request_bytes)
        assert len(connection.answers) == 1 and not connection.is_closed
    await once.send(more)
    await _wait_until(lambda: once.is_closed)

    async def trickle() -> None:
        while not again_and_again.is_closed:
            await again_and_again.send(more[:1])
            await asyncio.sleep(0.01)

    await asyncio.wait_for(trickle(), 60)
    assert len(again_and_again.answers) == len(once.answers) == 1


async def test_the_time_ends_with_the_next_head_and_not_a_request(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEAD_S", 0.2)
    connection = connect()
    await connection.send(UNREAD)
    for piece in (b"x" * 50_000, b"x" * 50_000 + b"GET /stream HTTP/1.1\r\n\r\n", b"\r\n"):
        connection.receive(piece)
    await asyncio.sleep(0.5)
    assert not connection.is_closed
    connection.may_end.set()
    await _wait_until(lambda: connection.raw.endswith(b"5\r\nended\r\n0\r\n\r\n"))
    await connection.send(b"\r\n")
    await _wait_until(lambda: connection.is_closed)


@pytest.mark.parametrize(
    "more", [b"\0", b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES, b"CONNECT a:1 HTTP/1.1\r\n\r\n"]
)
async def test_a_refusal_never_comes_in_the_middle_of_an_answer(connect: Connect, more: bytes) -> None:
    connection = connect()
    await connection.send(b"GET /stream HTTP/1.1\r\n\r\n", more)
    assert connection.is_closed
    assert connection.raw.count(b"HTTP/1.1 ") == 1 and connection.raw.endswith(b"begun\r\n")


async def test_a_request_that_is_no_http_behind_others_is_400(connect: Connect) -> None:
    connection = connect()
    await connection.send(NEXT, b"GET http:// HTTP/1.1\r\n\r\n")
    assert [status for status, _ in connection.answers] == [200, 400] and connection.is_closed


# ---- clients that know no chunks --------------------------------------------------------------------------


@pytest.mark.parametrize("version", [b"1.0", b"0.9", b"2.0"])
@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"])
async def test_a_stream_ends_with_its_connection(connect: Connect, version: bytes, more: bytes) -> None:
    connection = connect()
    connection.may_end.set()
    await connection.send(b"POST /stream HTTP/%b\r\nexpect: 100-continue\r\n%b\r\n" % (version, more))
    head, _, body = connection.raw.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [b"HTTP/1.1 200 OK", b"connection: close"]
    assert body == b"begunended" and connection.is_closed


async def test_an_answer_of_known_length_is_as_ever(connect: Connect) -> None:
    connection = connect()
    await connection.send(b"POST / HTTP/1.0\r\ncontent-length: 1\r\n\r\na")
    assert connection.seen == [("POST", "/", b"a")] and connection.is_closed


class Clock:
    """A loop's timers, which fire when they are told to."""

    def __init__(self) -> None:
        self.timers: list[asyncio.TimerHandle] = []

    def call_later(self, delay: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        assert delay == http_protocol.MAX_UNREAD_S
        self.timers.append(asyncio.TimerHandle(0, callback, args, asyncio.get_running_loop()))
        return self.timers[-1]

    def fire(self) -> None:
        for timer in self.timers.copy():
            self.timers.remove(timer)
            if not timer.cancelled():
                timer._run()


async def test_who_reads_nothing_for_long_has_gone(connect: Callable[[], Connection]) -> None:
    connection = connect()
    clock = connection.take_clock()
    connection.fill(100_000)
    for _ in range(3):
        connection.read(1)
        clock.fire()
        assert not connection.is_closed, "it reads slowly"
    clock.fire()
    assert connection.is_closed


async def test_who_has_read_all_may_wait(connect: Callable[[], Connection]) -> None:
    connection = connect()
    clock = connection.take_clock()
    connection.fill(100_000)
    connection.empty()
    clock.fire()
    assert not connection.is_closed
