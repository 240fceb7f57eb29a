"""Reads many event streams at once, and little more than counts what comes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

_EVENT = b'"content":"'
_USAGE = b'"completion_tokens":'
_TAIL_BYTES = 512
_END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What all streams of a run yielded together."""

    tokens: int
    """As the usage of each stream says."""
    events: int
    """Chunks with text."""
    seconds: float
    """From the first text to the last."""


async def run_streams(port: int, request: bytes, count: int) -> StreamResult:
    """Sends the same request on `count` connections at once and reads all streams to their ends."""
    loop = asyncio.get_running_loop()
    readers = [_Reader(loop.create_future()) for _ in range(count)]
    try:
        for reader in readers:
            await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)
        for reader in readers:
            reader.send(request)
        tokens = sum(await asyncio.gather(*(reader.tokens for reader in readers)))
    finally:
        for reader in readers:
            reader.close()
    return StreamResult(
        tokens=tokens,
        # The opening chunk of a chat has an empty text.
        events=sum(reader.events - 1 for reader in readers),
        seconds=max(reader.last_at for reader in readers) - min(reader.first_at for reader in readers),
    )


class _Reader(asyncio.Protocol):
    """One stream."""

    def __init__(self, tokens: asyncio.Future[int]) -> None:
        self.tokens = tokens
        self._transport: asyncio.WriteTransport | None = None
        self.events = 0
        self.first_at = self.last_at = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.last_at = time.perf_counter()
        if not self.first_at:
            self.first_at = self.last_at
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(data)
        self.events += data.count(_EVENT)
        if len(data) < _TAIL_BYTES:
            data = self._tail + data
        self._tail = data[-_TAIL_BYTES:]
        if _END in self._tail and not self.tokens.done():
            at = self._tail.rindex(_USAGE) + len(_USAGE)
            self.tokens.set_result(int(self._tail[at : self._tail.index(b",", at)]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(self._tail)

    def _fail(self, last: bytes) -> None:
        if not self.tokens.done():
            self.tokens.set_exception(ConnectionError(f"a stream ended with {last!r}"))
