"""A connection to Redis with neither tasks nor asyncio's streams in it: a batch of commands is one write, and
its replies are one call back. redis-py's own way costs the event loop a tenth of a millisecond more for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as RedisTimeoutError

_TICKS = 10
_NOTHING = object()


def packed(*command: str | bytes | int) -> bytes:
    """Returns a command as it goes over the wire."""
    return hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub knows commands of one word


class RedisWire(asyncio.Protocol):
    """Asks Redis one batch of commands at a time. Make one with `over`, in the event loop that it is for.

    What it calls back, `on_replies` or `on_failure`, may begin the next batch.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        transport: asyncio.WriteTransport,
        *,
        on_replies: Callable[[Sequence[Any]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """See `over`. Takes the transport from redis-py's streams, which still hear of its end."""
        encoder = connection.encoder
        self._parser = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection._parser.parse_error,
            encoding=encoder.encoding if encoder.decode_responses else None,
            errors=encoder.encoding_errors,
            notEnoughData=_NOTHING,
        )
        self._transport = transport
        self._streams = transport.get_protocol()
        self._on_replies = on_replies
        self._on_failure = on_failure
        self._replies: list[Any] = []
        self._expected = 0  # replies of the batch under way
        timeout_s = connection.socket_timeout
        self._tick_s = None if timeout_s is None else timeout_s / _TICKS
        self._ticks = 0
        self._alarm: asyncio.TimerHandle | None = None
        self.open = True
        """Whether it can be asked. When it no longer can, that stays so."""
        transport.set_protocol(self)

    @classmethod
    async def over(
        cls,
        connection: AbstractConnection,
        *,
        on_replies: Callable[[Sequence[Any]], None],
        on_failure: Callable[[Exception], None],
    ) -> RedisWire:
        """Connects, as redis-py does by all that its URL says, and returns the wire.

        The connection must not be used otherwise from now on, but for being disconnected; it belongs to the
        client's pool and ends with that. `on_replies` gets a reply or an exception for each command of a
        batch. `on_failure` is called instead where the connection breaks (redis' ConnectionError) or Redis is
        silent for the connection's `socket_timeout` (redis' TimeoutError): nobody knows then what was done.
        Raises RedisError and OSError.
        """
        await connection.connect()
        writer = connection._writer
        assert writer is not None
        return cls(connection, writer.transport, on_replies=on_replies, on_failure=on_failure)

    def ask(self, commands: Sequence[bytes]) -> None:
        """Sends commands, each `packed`. Call it only while `open`, and when the batch before has been called
        back for.
        """
        assert self.open and not self._expected
        self._expected, self._replies = len(commands), []
        self._ticks = 0
        self._set_alarm()
        self._transport.write(b"".join(commands))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            self._parser.feed(data)
            while (reply := self._parser.gets()) is not _NOTHING:
                if not isinstance(reply, hiredis.PushNotification):
                    self._replies.append(reply)
        except InvalidResponse as error:
            self._fail(error)
            return
        if self._expected and len(self._replies) >= self._expected:
            self._expected = 0
            self._on_replies(self._replies)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._streams.connection_lost(exc)
        self._fail(RedisConnectionError("Redis has closed the connection."))

    def _fail(self, error: Exception) -> None:
        """Closes it. What may still come on it answers nobody's question."""
        self.open = False
        if self._alarm is not None:
            self._alarm.cancel()
        self._transport.abort()
        if self._expected:
            self._expected = 0
            self._on_failure(error)

    def _set_alarm(self) -> None:
        if self._alarm is None and self._tick_s is not None:
            self._alarm = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        """Turns of the loop count, not time: see LoopTimeout. One alarm serves many short batches."""
        self._alarm = None
        if not self._expected:
            return
        self._ticks += 1
        if self._ticks < _TICKS:
            self._set_alarm()
        else:
            self._fail(RedisTimeoutError("Redis did not answer in time."))
