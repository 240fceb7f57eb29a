"""What Redis pushes over channels, handed on in the moment that it is read.

redis-py's own way has a message wait for turns of the event loop, behind requests that came after the change
that it tells of. Here it is there first, so what is kept in memory on its word is no older than what a client
can know who has waited for the change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError

from adapters.redis_wire import packed
from gateway import tasks
from gateway.tenants import text

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 0.15
_MOST_UNANSWERED = 2
"""Heartbeats. Counted rather than timed, for a loop that was held up has read no answers meanwhile."""
_CONNECT_TIMEOUT_S = 1.0
_RETRY_S = 0.25
_NOTHING = object()


class RedisPush:
    """Follows one channel. Each message goes to a callback, which is called on the event loop.

    `start` begins and `close` ends it. Keeps a connection of the client's for itself.
    """

    def __init__(self, redis: Redis, channel: str, on_message: Callable[[str], None]) -> None:
        self.since: float | None = None
        """From when on no message was missed, by time.monotonic(); None while some may be."""
        self._redis = redis
        self._channel = channel
        self._on_message = on_message
        self._connection: AbstractConnection | None = None
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Follows from now on, in a task of its own. Returns at once, also while Redis is away."""
        self._follower = tasks.start(self._follow(), f"push of {self._channel}")

    async def close(self) -> None:
        """Ends the task that `start` began."""
        if self._follower:
            await tasks.cancel(self._follower)
        self.since = None

    async def _follow(self) -> None:
        """Listens for ever, and begins anew when the connection is lost."""
        while True:
            try:
                await self._listen()
            except (RedisError, OSError, TimeoutError) as error:
                if self.since is not None:
                    logger.debug("lost the push of %s (%s)", self._channel, type(error).__name__)
                self.since = None
            await asyncio.sleep(_RETRY_S)

    async def _listen(self) -> None:
        """Returns never. Raises when the connection breaks, or is silent for longer than heartbeats allow."""
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            if self._connection is None:
                self._connection = await self._redis.connection_pool.get_connection()
            await self._connection.connect()
        wire = _Wire(self._connection, self._on_push)
        try:
            wire.send(packed("SUBSCRIBE", self._channel))
            while wire.unanswered <= _MOST_UNANSWERED:
                await asyncio.sleep(_HEARTBEAT_S)
                wire.send(packed("PING"))
            raise TimeoutError
        finally:
            wire.closed = True
            self.since = None
            await self._connection.disconnect(nowait=True)

    def _on_push(self, kind: str, data: Any) -> None:
        if kind == "subscribe":
            self.since = time.monotonic()
        elif kind == "message":
            self._on_message(text(data))
        else:
            self.since = None


class _Wire(asyncio.Protocol):
    """A connected connection of redis-py's, taken from its streams, which still hear of its end."""

    def __init__(self, connection: AbstractConnection, on_push: Callable[[str, Any], None]) -> None:
        writer = connection._writer
        assert writer is not None
        self.unanswered = 0
        """Commands. Their answers come behind the messages from before, so those are no later than these."""
        self.closed = False
        self._parser = hiredis.Reader(protocolError=InvalidResponse, notEnoughData=_NOTHING)
        self._transport = writer.transport
        self._streams = self._transport.get_protocol()
        self._on_push = on_push
        self._transport.set_protocol(self)

    def send(self, command: bytes) -> None:
        """Sends a command. Raises redis' ConnectionError where the connection has broken."""
        if self.closed or self._transport.is_closing():
            raise RedisConnectionError("Redis has closed the connection.")
        self.unanswered += 1
        self._transport.write(command)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.closed:
            return
        try:
            self._parser.feed(data)
            while not self.closed and (reply := self._parser.gets()) is not _NOTHING:
                self._take(reply)
        except InvalidResponse:
            self._end()

    def _take(self, reply: Any) -> None:
        kind = text(reply[0]) if isinstance(reply, list) else ""
        if kind != "message":
            self.unanswered -= 1
        if kind in ("message", "subscribe"):
            self._on_push(kind, reply[2])
        elif isinstance(reply, Exception | hiredis.PushNotification):  # it refuses, or goes another way
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._streams.connection_lost(exc)
        self._end()

    def _end(self) -> None:
        """Says that it is lost; not if it was closed here, and goes when the next has long come."""
        if not self.closed:
            self.closed = True
            self._on_push("lost", None)
