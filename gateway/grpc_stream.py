"""One bidirectional gRPC stream on a connection of its own, read and written on the event loop.

gRPC's library has a thread read and write, which hands each message over: 0.15 ms of a core for a request and
its answer, and three switches between threads. A stream that lasts needs little of what the library can do.
This is as much of HTTP/2 (RFC 9113) as that: the one stream, flow control both ways, and pings.

    frame     size 24 | kind 8 | flags 8 | stream 32 | payload
    message   compressed 8 | size 32 | data             in the payloads of DATA frames, cut anywhere

What the other side says in headers is not read, and so need not be decompressed: they begin the stream, or
they end it, and why it ended is asked better where a connection is made anew.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_ENABLE_PUSH, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 2, 4, 5
_CANCEL = 8
_STREAM = 1
"""The number of ours; what concerns the connection has 0."""

_FRAME = struct.Struct(">HBBBI")
_MESSAGE = struct.Struct(">BI")
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_DEFAULT_WINDOW = 65_535
_DEFAULT_FRAME = 16_384
_WINDOW = 4 << 20
"""How much may be on its way to us. Who sends more waits, and engines then put steps together."""
_MAX_MESSAGE = 64 << 20
_PING_S = 5.0
_MOST_UNANSWERED = 2
"""Pings. Counted rather than timed, for a loop that was held up has read no answers meanwhile."""


class BrokenStream(Exception):
    """What came is no HTTP/2, or no message of gRPC."""


class GrpcStream(asyncio.Protocol):
    """A stream that is open from the beginning; make one with `open_stream`."""

    def __init__(
        self, path: str, authority: str, on_message: Callable[[bytes], None], *, ping_s: float = _PING_S
    ) -> None:
        """`on_message` gets each message as it comes. What it raises ends the stream."""
        self._path, self._authority = path, authority
        self._on_message = on_message
        self._ping_s = ping_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None  # None: not connected yet, or over
        self._unread = b""  # a frame that has not come whole
        self._message = bytearray()  # a message that has not come whole
        self._unsent = bytearray()  # what the other side's windows have no room for
        self._taken = 0  # bytes that have come since the other side was last told that they are read
        self._window = self._stream_window = _DEFAULT_WINDOW  # bytes that may be sent
        self._initial_window, self._largest_frame = _DEFAULT_WINDOW, _DEFAULT_FRAME
        self._unanswered = 0  # pings
        self._alarm: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[Exception | None] = self._loop.create_future()

    async def wait_over(self) -> None:
        """Returns when the other side has ended the stream. Raises what else ended it: OSError for the
        connection, BrokenStream, or what `on_message` has raised.
        """
        if (error := await asyncio.shield(self._over)) is not None:
            raise error

    def send(self, message: bytes) -> None:
        """Sends a message, as soon as the other side has room for it. One that is over takes none."""
        if self._transport is not None:
            self._unsent += _MESSAGE.pack(0, len(message)) + message
            self._send_what_fits()

    def close(self) -> None:
        """Ends the stream and its connection. May be called again."""
        if self._transport is not None:
            self._write(_RST_STREAM, 0, _STREAM, _NUMBER.pack(_CANCEL))
        self._end(None)

    # ---- what the event loop calls ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        self._transport = transport
        transport.write(_PREFACE)
        settings = _SETTING.pack(_ENABLE_PUSH, 0) + _SETTING.pack(_INITIAL_WINDOW_SIZE, _WINDOW)
        self._write(_SETTINGS, 0, 0, settings)
        self._write(_WINDOW_UPDATE, 0, 0, _NUMBER.pack(_WINDOW - _DEFAULT_WINDOW))
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": self._path,
            ":authority": self._authority,
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers.items())
        self._write(_HEADERS, _END_HEADERS, _STREAM, block)
        self._alarm = self._loop.call_later(self._ping_s, self._ping)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._unanswered = 0
        try:
            self._take_frames(self._unread + data if self._unread else data)
        except Exception as error:  # whatever it is: what follows cannot be understood any more
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end(exc or ConnectionResetError("the connection was closed"))

    # ---- what comes -----------------------------------------------------------------------------------

    def _take_frames(self, data: bytes) -> None:
        at = 0
        while len(data) - at >= _FRAME.size and self._transport is not None:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, at)
            size = high << 8 | low
            if size > _DEFAULT_FRAME:
                raise BrokenStream(f"a frame of {size:,} bytes came, of at most {_DEFAULT_FRAME:,}")
            begin, end = at + _FRAME.size, at + _FRAME.size + size
            if len(data) < end:
                break
            self._take(kind, flags, stream, data[begin:end])
            at = end
        self._unread = data[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._take_data(payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload)
            self._give_room(len(payload))
        elif kind == _WINDOW_UPDATE:
            (more,) = _NUMBER.unpack(payload)
            if stream:
                self._stream_window += more
            else:
                self._window += more
            self._send_what_fits()
        elif kind == _PING and not flags & _ACK:
            self._write(_PING, _ACK, 0, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._take_settings(payload)
        elif kind == _RST_STREAM:
            raise ConnectionResetError(f"the stream was reset with code {_NUMBER.unpack(payload)[0]}")
        # What GOAWAY announces comes by itself. Other kinds say nothing that matters here.
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            self._end(None)

    def _take_data(self, data: bytes) -> None:
        message = self._message
        message += data
        while len(message) >= _MESSAGE.size and self._transport is not None:
            compressed, size = _MESSAGE.unpack_from(message)
            if compressed or size > _MAX_MESSAGE:
                raise BrokenStream("a message came that is compressed, or too large")
            end = _MESSAGE.size + size
            if len(message) < end:
                break
            whole = bytes(message[_MESSAGE.size : end])
            del message[:end]
            self._on_message(whole)

    def _give_room(self, size: int) -> None:
        """Lets the other side send more once half of what it may send has been read."""
        self._taken += size
        if 2 * self._taken >= _WINDOW:
            more = _NUMBER.pack(self._taken)
            self._taken = 0
            self._write(_WINDOW_UPDATE, 0, 0, more)
            self._write(_WINDOW_UPDATE, 0, _STREAM, more)

    def _take_settings(self, payload: bytes) -> None:
        for name, value in _SETTING.iter_unpack(payload):
            if name == _INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif name == _MAX_FRAME_SIZE:
                self._largest_frame = value
        self._write(_SETTINGS, _ACK, 0)
        self._send_what_fits()

    # ---- what goes ------------------------------------------------------------------------------------

    def _send_what_fits(self) -> None:
        unsent = self._unsent
        while unsent and (room := min(self._window, self._stream_window, self._largest_frame)) > 0:
            payload = bytes(unsent[:room])
            del unsent[:room]
            self._window -= len(payload)
            self._stream_window -= len(payload)
            self._write(_DATA, 0, _STREAM, payload)

    def _write(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        if self._transport is not None:
            size = len(payload)
            self._transport.write(_FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload)

    def _ping(self) -> None:
        if self._unanswered >= _MOST_UNANSWERED:
            self._end(TimeoutError("nothing has come for some pings"))
            return
        self._unanswered += 1
        self._write(_PING, 0, 0, bytes(8))
        self._alarm = self._loop.call_later(self._ping_s, self._ping)

    def _end(self, error: Exception | None) -> None:
        """The only place where it becomes over."""
        if self._alarm is not None:
            self._alarm.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close() if error is None else transport.abort()
        if not self._over.done():
            self._over.set_result(error)


async def open_stream(address: str, path: str, on_message: Callable[[bytes], None]) -> GrpcStream:
    """Connects to `host:port` and returns the stream of a method, `/package.Service/Method`. The caller must
    close it. Raises OSError.
    """
    host, _, port = address.rpartition(":")
    _, stream = await asyncio.get_running_loop().create_connection(
        lambda: GrpcStream(path, address, on_message), host.strip("[]"), int(port)
    )
    return stream


def _literal(text: str) -> bytes:
    """Returns a text as a header that is not remembered has it, not compressed (RFC 7541)."""
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    size, rest = bytes([127]), len(data) - 127
    while rest >= 128:
        size, rest = size + bytes([rest % 128 + 128]), rest // 128
    return size + bytes([rest]) + data
