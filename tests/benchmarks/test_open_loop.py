"""The open loop charges a server with all that waited; pools and stream readers read rightly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.open_loop import HttpPool, quantile, run_open_loop
from benchmarks.raw_streams import run_streams

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
STALL_S = 0.2


@asynccontextmanager
async def served(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    """Yields the port of a server that reads requests as above, and answers each; clients must leave it."""
    left: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left.append(asyncio.current_task())
        while await reader.read(len(REQUEST)):
            await answer(writer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.wait([task for task in left if task is not None])


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile([3, 1, 2, 4], share) for share in (0.25, 0.5, 0.99, 1)] == [1, 2, 4, 4]


async def test_a_stall_is_charged_to_all_that_waited_for_it() -> None:
    def send(index: int, answered: Callable[[], None]) -> None:
        if index == 0:
            time.sleep(
                STALL_S
            )  # holds up the sender: what is due meanwhile is sent late, and answered at once
        answered()

    latencies = await run_open_loop(send, rate=200, seconds=STALL_S, seed=3)
    assert 20 < latencies.requests < 70
    assert latencies.median > 1e3 * STALL_S / 4, "each counts from when it was due"
    assert latencies.largest >= latencies.p99 >= latencies.median
    assert latencies.sent_late_p99 > 1e3 * STALL_S / 4, "and the sender's part is told apart"


async def test_a_pool_reads_whole_answers_and_notes_refusals() -> None:
    answers = iter([b"200 OK\r\nContent-Length: 5\r\n\r\nhello", b"429 No\r\ncontent-length: 2\r\n\r\nno"])

    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in (b"HTTP/1.1 ", next(answers)):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)

    async with served(answer) as port:
        pool = HttpPool(port)
        for _ in range(2):
            done = asyncio.Event()
            pool.send(REQUEST, done.set)
            await done.wait()
        pool.close()
    assert [failure[:12] for failure in pool.failures] == [b"HTTP/1.1 429"]


async def test_streams_are_counted_by_their_usage() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"content":""}\n\n')
        for _ in range(3):
            writer.write(b'data: {"content":"x"}\n\n')
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(b'data: {"usage":{"completion_tokens":4,"total_tokens":9}}\n\ndata: [DO')
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b"NE]\n\n")

    async with served(answer) as port:
        result = await run_streams(port, [REQUEST] * 3)
    assert (result.tokens, result.events) == (12, 9)
    assert result.whole_seconds >= max(result.first_texts) > 0


async def test_a_refused_stream_ends_the_run() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")

    async with served(answer) as port:
        with pytest.raises(ConnectionError, match="503"):
            await run_streams(port, [REQUEST])
