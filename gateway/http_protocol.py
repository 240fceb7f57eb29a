"""uvicorn's HTTP protocol with what it lacks: bounds on all of a request but its body, errors in OpenAI's
shape, word of clients that go, answers that go out in one piece, and requests that end where they say.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Transport
from asyncio.events import TimerHandle
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import orjson
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway import disconnects, whole_answer
from gateway.disconnects import Disconnects
from gateway.errors import error_body

MAX_HEAD_BYTES = 64 * 1024
"""The most that is read of a request line and headers that do not end, and of what is around a body's pieces:
extensions of chunks, trailers, and empty lines.
"""
MAX_HEAD_S = 30.0
"""In what time a head must have come, from the first byte behind a request that has been answered, whatever
that byte is; a new connection's begins when it is made.
"""
MAX_UNREAD_S = 60.0
"""For how long a client may read nothing while the buffers on the way to it are full; then it has gone."""


class HeldHead(Transport):
    """The transport of one answer, whose first write, its head, goes out together with the second, or else
    with the loop's next turn. Each write is a system call, a packet, and a reason for the client to wake.
    """

    def __init__(self, transport: Transport, loop: AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """See asyncio.WriteTransport."""
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._send_head)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """See asyncio.BaseTransport."""
        self._send_head()
        self._transport.close()

    def is_closing(self) -> bool:
        """See asyncio.BaseTransport."""
        return self._transport.is_closing()

    def _send_head(self) -> None:
        if self._head:
            self.write(b"")


async def _send_without_chunks(cycle: RequestResponseCycle, message: Any) -> None:
    """A cycle's `send` to a client that knows no chunks: the end of the connection is the answer's."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False:
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


class BoundedHttp(HttpToolsProtocol):
    """One connection of a client. What it sends beside requests' bodies is bounded in size and in time."""

    _in_head = True
    _bare_bytes = 0
    """How much has come since a head ended, or a piece of a body, or a request."""
    _met_end = False
    """Whether one of them came in what is being read, which then is not counted."""
    _timer: TimerHandle | None = None
    _unread_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._disconnects = Disconnects()
        self._extensions: dict[str, dict[object, object]] = {
            disconnects.EXTENSION: {"disconnects": self._disconnects},
            whole_answer.EXTENSION: {"send": self._send_whole},
        }
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)
        self._disconnects.tell()
        del self._extensions[whole_answer.EXTENSION]  # which refers to this

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        self._stop_unread_timer()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._unset_keepalive_if_required()
        self._met_end = False
        self._parse(data)
        if not self._met_end:
            self._bare_bytes += len(data)
            if self._bare_bytes > MAX_HEAD_BYTES:
                what = "headers are" if self._in_head else "trailers, or extensions of chunks, are"
                self._refuse(431, f"The request's {what} larger than {MAX_HEAD_BYTES:,} bytes.")
                return
        # Most requests come whole, and need no timer. While one is served, its handler bounds its body.
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_timer()

    def _parse(self, data: bytes) -> None:
        """Has the parser read what came.

        The parser ends where a request asks for another protocol with `Upgrade`, and takes its body for that.
        No other is spoken here, which leaves the request as it is (RFC 9110, 7.8): so its head is read again,
        by a new parser, without that header.
        """
        rest: bytes | memoryview = data
        try:
            while rest:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as end:
                    if self.parser.get_method() == b"CONNECT":
                        self._refuse(400, "CONNECT is not served: this is no proxy.")
                        return
                    rest = memoryview(rest)[end.args[0] :]  # shorter: at least the head's last byte was there
                    self._read_without_upgrade()
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _read_without_upgrade(self) -> None:
        version = self.parser.get_http_version().encode()
        start = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.parser.feed_data(b"\r\n".join([start, *lines, b"", b""]))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._in_head = True

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        if self.parser.should_upgrade():
            return  # it comes again
        super().on_headers_complete()
        self.headers = []  # for trailers: the scope has those that came in the head, and keeps them
        self._in_head, self._bare_bytes, self._met_end = False, 0, True
        self._stop_timer()
        cycle = self.cycle
        cycle.transport = HeldHead(self.transport, self.loop)
        if self.scope["http_version"] != "1.1":
            cycle.keep_alive = cycle.waiting_for_100_continue = False
            cycle.send = partial(_send_without_chunks, cycle)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._bare_bytes, self._met_end = 0, True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._in_head:
            return  # what should_upgrade
        self._bare_bytes, self._met_end = 0, True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called where the parser finds no HTTP."""
        self._refuse(400, msg)

    def _send_whole(self, scope: Scope, headers: bytes, body: bytes) -> bool:
        """See SendWhole. Does what uvicorn does for two messages, unless more is to do than most times."""
        cycle = self.cycle
        if (
            cycle.scope is not scope  # requests are waiting behind it
            or cycle.disconnected
            or cycle.response_started
            or not cycle.keep_alive
            or self.flow.write_paused
        ):
            return False
        default = b"".join([b"%b: %b\r\n" % header for header in self.server_state.default_headers])
        self.transport.write(b"HTTP/1.1 200 OK\r\n" + default + headers + b"\r\n" + body)
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(MAX_HEAD_S, self._on_slow_head)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_unread(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(MAX_UNREAD_S, self._on_unread, unread)

    def _on_unread(self, before: int) -> None:
        """Else whoever does not read would keep its request, its place among those that run and its answer
        for as long as its host lives.
        """
        if self.transport.get_write_buffer_size() < before:
            self._watch_unread()
        else:
            self.transport.abort()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _on_slow_head(self) -> None:
        if not self._in_head or self._bare_bytes == 0:  # no request has begun: nobody waits for an answer
            self.transport.close()
            return
        self._refuse(408, f"The request's headers did not arrive within {MAX_HEAD_S:g} seconds.")

    def _refuse(self, status: int, message: str) -> None:
        """Answers without asking the application, which has not seen this request, and closes. Says nothing
        where that would come into another's answer, or behind this one's.
        """
        if self.transport.is_closing():
            return
        if not self._has_answer():
            body = orjson.dumps(error_body(message, type="invalid_request_error"))
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _has_answer(self) -> bool:
        """Whether an answer is under way, or has been sent to the request that is being read."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started:
            return bool(self.pipeline)
        return not (self._in_head and cycle.response_complete)
