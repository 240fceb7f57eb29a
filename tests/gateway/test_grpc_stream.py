"""A stream of gRPC on the event loop: against gRPC's own server, and against sockets that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from gateway.grpc_stream import BrokenStream, GrpcStream, open_stream

METHOD = "/test.Echo/Link"
TIMEOUT_S = 20
FRAME = struct.Struct(">HBBBI")
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
PREFACE_BYTES = 24

Messages = AsyncIterator[bytes]


@contextlib.asynccontextmanager
async def grpc_server(answer: Callable[[Messages], Messages]) -> AsyncIterator[str]:
    """Serves a method of bytes by gRPC's library. Yields its address."""

    async def serve(requests: Messages, context: object) -> Messages:
        async for message in answer(requests):
            yield message

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    handler = grpc.stream_stream_rpc_method_handler(serve)  # type: ignore[arg-type]  # bytes both ways
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Link": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def socket_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Serves connections by a function, which says what is written. Yields its address."""

    talks: set[asyncio.Task[object]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk_task = asyncio.current_task()
        assert talk_task is not None
        talks.add(talk_task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(PREFACE_BYTES)
            await talk(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*talks)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    high, low, kind, flags, stream = FRAME.unpack(await reader.readexactly(FRAME.size))
    return kind, flags, stream, await reader.readexactly(high << 8 | low)


async def echo(requests: Messages) -> Messages:
    async for request in requests:
        yield request


async def collect(address: str, sent: list[bytes], count: int) -> list[bytes]:
    """Sends messages on a stream, and returns the first that come."""
    came: asyncio.Queue[bytes] = asyncio.Queue()
    stream = await open_stream(address, METHOD, came.put_nowait)
    try:
        for each in sent:
            stream.send(each)
        async with asyncio.timeout(TIMEOUT_S):
            return [await came.get() for _ in range(count)]
    finally:
        stream.close()


async def test_messages_of_all_sizes_come_back_whole_and_in_order() -> None:
    sizes = [0, 1, 16_379, 16_380, 65_530, 3, 9_000_000, 0, 70_000, *range(50)]  # 9 MB: more than any window
    sent = [random.Random(size).randbytes(size) for size in sizes]
    async with grpc_server(echo) as address:
        assert await collect(address, sent, len(sent)) == sent


async def test_a_server_that_reads_nothing_is_sent_no_more_than_it_has_room_for() -> None:
    received = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        while received < 65_535:
            kind, _, _, payload = await read_frame(reader)
            received += len(payload) if kind == DATA else 0
        # What a ping is answered after would have come before the answer.
        writer.write(frame(PING, 0, 0, b"12345678"))
        while (await read_frame(reader))[:2] != (PING, 1):
            pass
        writer.write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 10)))
        writer.write(frame(SETTINGS, 0, 0, struct.pack(">HIHI", 4, 65_535 + 5, 5, 20_000)))
        kind, flags, _, payload = await read_frame(reader)
        assert (kind, flags) == (SETTINGS, 1)
        kind, _, _, payload = await read_frame(reader)
        writer.write(frame(DATA, 0, 1, message(b"%d+%d" % (received, len(payload)))))
        await reader.read()

    async with socket_server(talk) as address:
        assert await collect(address, [bytes(200_000)], 1) == [b"65535+5"]  # the least of all windows


async def test_it_does_not_matter_where_what_comes_is_cut() -> None:
    chance = random.Random(5)
    sent = [chance.randbytes(chance.choice([0, 3, 40, 300])) for _ in range(40)]
    data = b"".join(map(message, sent))
    frames = frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, b"unreadable") + frame(99, 0, 0, b"unknown")
    while data:
        size, padding = chance.randrange(200), chance.randrange(9)
        part, data = data[:size], data[size:]
        frames += frame(DATA, 0x8, 1, bytes([padding]) + part + bytes(padding))
    came: list[bytes] = []
    stream = GrpcStream(METHOD, "engine", came.append)
    stream.connection_made(_NoTransport())
    while frames:
        size = chance.randrange(1, 30)
        stream.data_received(frames[:size])
        frames = frames[size:]
    assert came == sent
    stream.close()


async def test_a_server_that_ends_the_stream_ends_it() -> None:
    async def one(requests: Messages) -> Messages:
        yield await anext(requests)

    async with grpc_server(one) as address, asyncio.timeout(TIMEOUT_S):
        came: list[bytes] = []
        stream = await open_stream(address, METHOD, came.append)
        stream.send(b"only")
        await stream.wait_over()
        stream.send(b"too late")
    assert came == [b"only"]


async def test_a_server_sees_a_stream_that_is_closed() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(requests: Messages) -> Messages:
        begun.set()
        try:
            async for request in requests:
                yield request
        finally:
            ended.set()

    async with grpc_server(wait) as address, asyncio.timeout(TIMEOUT_S):
        stream = await open_stream(address, METHOD, lambda _: None)
        await begun.wait()
        stream.close()
        stream.close()
        await ended.wait()
        await stream.wait_over()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ConnectionError),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", BrokenStream),
        (frame(RST_STREAM, 0, 1, struct.pack(">I", 2)), ConnectionError),
        (frame(DATA, 0, 1, b"\x01\0\0\0\x01x"), BrokenStream),
        (frame(DATA, 0, 1, b"\0\xff\0\0\0"), BrokenStream),
        (frame(WINDOW_UPDATE, 0, 1, b"?"), struct.error),
        (frame(DATA, 0, 1, message(b"fails")), KeyError),
    ],
    ids=["closes", "no HTTP/2", "resets", "compressed", "too large", "no number", "who takes it fails"],
)
async def test_what_cannot_go_on_is_over(answer: bytes, error: type[Exception]) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if answer:
            await reader.read()

    def fail(_: bytes) -> None:
        raise KeyError

    async with socket_server(talk) as address, asyncio.timeout(TIMEOUT_S):
        stream = await open_stream(address, METHOD, fail)
        with pytest.raises(error):
            await stream.wait_over()


async def test_a_server_that_has_gone_silently_is_noticed_and_one_that_answers_pings_is_not() -> None:
    pings = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal pings
        while True:
            kind, flags, _, payload = await read_frame(reader)
            if kind == PING and not flags:
                pings += 1
                if pings <= 5:
                    writer.write(frame(PING, 1, 0, payload))

    async with socket_server(talk) as address, asyncio.timeout(TIMEOUT_S):
        host, port = address.split(":")
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: GrpcStream(METHOD, address, lambda _: None, ping_s=0.05), host, int(port)
        )
        with pytest.raises(TimeoutError):
            await stream.wait_over()
    assert pings >= 7  # those that were answered, and two that were not


async def test_a_long_authority_is_sent_as_it_is() -> None:
    """Headers of more than 126 bytes have a length of two bytes or three."""
    name = "engine." * 40 + "local"

    async def answer(requests: Messages) -> Messages:
        yield await anext(requests)

    async with grpc_server(answer) as address, asyncio.timeout(TIMEOUT_S):
        host, port = address.split(":")
        came: asyncio.Queue[bytes] = asyncio.Queue()
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: GrpcStream(METHOD, name, came.put_nowait), host, int(port)
        )
        stream.send(b"hello")
        assert await came.get() == b"hello"
        stream.close()


class _NoTransport(asyncio.Transport):
    """Takes all that is written."""

    def write(self, data: object) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass
