"""Requests that arrive at random, whether or not the server keeps up, and the means to send them cheaply.

A request's latency counts from the moment at which it should have been sent: a server that stalls, or a
sender that is late, is charged with all that waited meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import cast

from protos.engine_pb2 import LinkRequest, LinkResponse, Submit
from protos.engine_pb2_grpc import EngineStub

_SETTLE_S = 0.05
_LINE_END = b"\r\n\r\n"
_LENGTH = b"content-length: "


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of all requests but the first, in milliseconds."""

    requests: int
    median: float
    p90: float
    p99: float
    largest: float
    sent_late_p99: float
    """How late the sender itself was; part of the latencies."""


Send = Callable[[int, Callable[[], None]], None]
"""Sends the request of a number, and has the function called once it is answered. On the event loop."""


async def run_open_loop(send: Send, *, rate: float, seconds: float, seed: int, discard: int = 0) -> Latencies:
    """Sends requests at random times (Poisson), `rate` a second on average, and waits for all answers.

    The first `discard` requests are not counted.
    """
    loop = asyncio.get_running_loop()
    due = _arrivals(rate, seconds, seed)
    began = time.perf_counter() + _SETTLE_S
    answered_at, sent_at = [0.0] * len(due), [0.0] * len(due)
    left, done = len(due), asyncio.Event()

    def send_one(index: int) -> None:
        def answered() -> None:
            nonlocal left
            answered_at[index] = time.perf_counter() - began
            left -= 1
            if not left:
                done.set()

        sent_at[index] = time.perf_counter() - began
        send(index, answered)

    def keep_time() -> None:
        # In a thread, since the timers of event loops go by whole milliseconds.
        for index, at in enumerate(due):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            loop.call_soon_threadsafe(send_one, index)

    clock = threading.Thread(target=keep_time)
    clock.start()
    await done.wait()
    clock.join()
    latencies = [1e3 * (answered_at[i] - due[i]) for i in range(discard, len(due))]
    lateness = [1e3 * (sent_at[i] - due[i]) for i in range(discard, len(due))]
    return Latencies(
        requests=len(latencies),
        median=quantile(latencies, 0.5),
        p90=quantile(latencies, 0.9),
        p99=quantile(latencies, 0.99),
        largest=quantile(latencies, 1),
        sent_late_p99=quantile(lateness, 0.99),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed, rounded for a report."""
    ordered = sorted(values)
    return round(ordered[math.ceil(share * len(ordered)) - 1], 3)


def _arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    chance = random.Random(seed)
    due, at = [], 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        due.append(at)
    return due


class HttpPool:
    """HTTP/1.1 over connections that are kept, each with one request at a time; more are opened as needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: deque[_Connection] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self.failures: list[bytes] = []
        """Answers other than 200."""

    async def open(self, count: int) -> None:
        """Opens connections ahead of the first requests."""
        for _ in range(count):
            self._idle.append(await self._connect())

    def send(self, request: bytes, answered: Callable[[], None]) -> None:
        """Sends a whole request, and calls `answered` once its whole answer is there."""
        if self._idle:
            self._idle.popleft().send(request, answered)
            return
        task = asyncio.get_running_loop().create_task(self._send_on_new(request, answered))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _send_on_new(self, request: bytes, answered: Callable[[], None]) -> None:
        (await self._connect()).send(request, answered)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
        return connection

    def take_back(self, connection: _Connection, answer: bytes) -> None:
        """A connection's answer is complete: another request may use it."""
        if not answer.startswith(b"HTTP/1.1 200"):
            self.failures.append(answer)
        self._idle.append(connection)

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection of a pool; its answers have a content length."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._answer = bytearray()
        self._length = 0
        self._transport: asyncio.WriteTransport | None = None
        self._answered: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self, request: bytes, answered: Callable[[], None]) -> None:
        assert self._transport is not None
        self._answered, self._length = answered, 0
        self._answer.clear()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if not self._length:
            head = self._answer.find(_LINE_END)
            if head < 0:
                return
            at = self._answer.lower().index(_LENGTH, 0, head) + len(_LENGTH)
            self._length = head + len(_LINE_END) + int(self._answer[at : self._answer.index(b"\r", at)])
        if len(self._answer) >= self._length and self._answered is not None:
            answered, self._answered = self._answered, None
            answered()
            self._pool.take_back(self, bytes(self._answer))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None:
            self._answered()
            self._pool.failures.append(b"the connection was closed")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class DirectLink:
    """An engine's link with nothing between: what a gateway's latency is compared with."""

    def __init__(self, stub: EngineStub) -> None:
        self._outbox: asyncio.Queue[LinkRequest] = asyncio.Queue()
        self._answered: dict[int, Callable[[], None]] = {}
        self._stream = stub.Link(self._outgoing())
        self._reader = asyncio.get_running_loop().create_task(self._read())

    def send(self, submit: Submit, answered: Callable[[], None]) -> None:
        """Submits a request of one choice, whose id must be free, and calls `answered` when it has ended."""
        self._answered[submit.request_id] = answered
        self._outbox.put_nowait(LinkRequest(submit=submit))

    def close(self) -> None:
        """Ends the link."""
        self._reader.cancel()
        self._stream.cancel()

    async def _outgoing(self) -> AsyncIterator[LinkRequest]:
        while True:
            yield await self._outbox.get()

    async def _read(self) -> None:
        message: LinkResponse
        async for message in self._stream:
            for finished in message.finished:
                self._answered.pop(finished.request_id)()
