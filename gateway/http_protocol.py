"""uvicorn's HTTP protocol with what it lacks: bounds on a request's head, errors in OpenAI's shape, word of
clients that go, and answers that go out in one piece.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Transport
from asyncio.events import TimerHandle
from http import HTTPStatus

import orjson
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway import disconnects, whole_answer
from gateway.disconnects import Disconnects
from gateway.errors import error_body

MAX_HEAD_BYTES = 64 * 1024
"""The most that is read of a request line and headers that do not end."""
MAX_HEAD_S = 30.0
"""In what time they must have come; a new connection's begins when it is made."""


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


class BoundedHttp(HttpToolsProtocol):
    """One connection of a client. What it sends before a request's body is bounded in size and in time."""

    _in_head = True
    _head_bytes = 0
    _ended_one = False
    """Whether a request has ended in what is being read: the next one's head may have begun behind it."""
    _timer: TimerHandle | None = None

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
        super().connection_lost(exc)
        self._disconnects.tell()
        del self._extensions[whole_answer.EXTENSION]  # which refers to this

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._ended_one = False
        super().data_received(data)
        if self._in_head:
            self._head_bytes += 0 if self._ended_one else len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The request's headers are larger than {MAX_HEAD_BYTES:,} bytes.")
            elif self._timer is None:  # most come whole, and need none
                self._start_timer()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = HeldHead(self.transport, self.loop)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._ended_one = True
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

    def _on_slow_head(self) -> None:
        if self._head_bytes == 0:  # opened in advance, and not used: nobody waits for an answer
            self.transport.close()
            return
        self._refuse(408, f"The request's headers did not arrive within {MAX_HEAD_S:g} seconds.")

    def _refuse(self, status: int, message: str) -> None:
        """Answers without asking the application, which has not seen this request, and closes."""
        if self.transport.is_closing():
            return
        body = orjson.dumps(error_body(message, type="invalid_request_error"))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
