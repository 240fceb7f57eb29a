"""Reads many event streams at once, and little more than counts what comes, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

_EVENT = b'"content":"'
_USAGE = b'"completion_tokens":'
_TAIL_BYTES = 512
_END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What all streams of a run yielded together. Times in seconds."""

    tokens: int
    """As the usage of each stream says."""
    events: int
    """Chunks with text."""
    seconds: float
    """From the first text to the last."""
    whole_seconds: float
    """From the first request to the last text."""
    first_texts: list[float]
    """From each request to its first text."""
    gaps: list[float]
    """Between a stream's texts, where they came apart, of all streams."""


async def run_streams(port: int, requests: Sequence[bytes]) -> StreamResult:
    """Sends each request on a connection of its own, all at once, and reads all streams to their ends."""
    loop = asyncio.get_running_loop()
    readers = [_Reader(loop.create_future()) for _ in requests]
    try:
        for reader in readers:
            await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)
        for reader, request in zip(readers, requests, strict=True):
            reader.send(request)
        tokens = sum(await asyncio.gather(*(reader.tokens for reader in readers)))
    finally:
        for reader in readers:
            reader.close()
    last = max(reader.texts_at[-1] for reader in readers)
    return StreamResult(
        tokens=tokens,
        # The opening chunk of a chat has an empty text.
        events=sum(reader.events - 1 for reader in readers),
        seconds=last - min(reader.texts_at[0] for reader in readers),
        whole_seconds=last - min(reader.sent_at for reader in readers),
        first_texts=[reader.texts_at[0] - reader.sent_at for reader in readers],
        gaps=[later - earlier for reader in readers for earlier, later in pairwise(reader.texts_at)],
    )


class _Reader(asyncio.Protocol):
    """One stream."""

    def __init__(self, tokens: asyncio.Future[int]) -> None:
        self.tokens = tokens
        self._transport: asyncio.WriteTransport | None = None
        self.events = 0
        self.sent_at = 0.0
        self.texts_at: list[float] = []
        self._has_begun = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._transport.write(request)
        self.sent_at = time.perf_counter()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(data)
        events = data.count(_EVENT)
        self.events += events
        if events and self.events > 1:
            self.texts_at.append(time.perf_counter())
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
