"""One Redis script, asked by many requests at once: those that meet share a round trip."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from adapters.loop_timeout import LoopTimeout

Call = tuple[Sequence[str], Sequence[str | bytes]]
"""Keys and arguments."""


class ScriptBatches:
    """Runs a script for its callers, in a pipeline with whoever asks while another run is under way.

    A round trip costs the event loop far more than it costs Redis, so a burst of requests is answered by two
    or three of them. Each call runs in Redis after it was made, as if it had gone alone. For one event loop.

    Keeps a connection of the client's for itself from its first call on, which ends with the client's pool:
    to take one and give it back each time would cost half as much again as the round trip.
    """

    def __init__(self, redis: Redis, script: AsyncScript) -> None:
        self._redis = redis
        self._script = script
        self._connection: AbstractConnection | None = None
        self._answer_s: float | None = None
        self._waiting: list[tuple[Sequence[str], Sequence[str | bytes], asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, keys: Sequence[str], args: Sequence[str | bytes]) -> Any:
        """The script's reply. Raises what Redis or the connection raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((keys, args, answer))
        if self._task is None:
            self._task = loop.create_task(self._run(), name="script-batches")
        return await answer

    def prepare(self) -> None:
        """Begins to connect and to teach Redis the script, so that a first burst of calls waits for neither.

        Does not fail where Redis is away.
        """
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._run(prepare=True), name="script-batches"
            )

    async def _run(self, *, prepare: bool = False) -> None:
        try:
            if prepare:
                with contextlib.suppress(RedisError, OSError):
                    await (await self._connected()).connect()
                    await self._redis.script_load(self._script.script)
            while self._waiting:
                batch, self._waiting = self._waiting, []
                replies = await self._replies([(keys, args) for keys, args, _ in batch])
                for (_, _, answer), reply in zip(batch, replies, strict=True):
                    if answer.done():  # its caller has gone
                        continue
                    if isinstance(reply, Exception):
                        answer.set_exception(reply)
                    else:
                        answer.set_result(reply)
        finally:
            self._task = None

    async def _replies(self, calls: Sequence[Call]) -> Sequence[Any]:
        """A reply or an exception for each call: one round trip, or three where Redis has lost the script."""
        try:
            replies = await self._send(calls)
            unknown = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if unknown:
                await self._redis.script_load(self._script.script)
                again = await self._send([calls[n] for n in unknown])
                for n, reply in zip(unknown, again, strict=True):
                    replies[n] = reply
            return replies
        except Exception as error:
            return [error] * len(calls)

    async def _send(self, calls: Sequence[Call]) -> list[Any]:
        """A reply for each call. Tries a second time where the connection turns out to be broken."""
        try:
            return await self._send_once(calls)
        except RedisConnectionError:
            return await self._send_once(calls)

    async def _send_once(self, calls: Sequence[Call]) -> list[Any]:
        connection = await self._connected()
        try:
            async with LoopTimeout(self._answer_s):
                # By its hash: of a script object, redis-py asks for each pipeline whether Redis has it.
                commands = [("EVALSHA", self._script.sha, len(keys), *keys, *args) for keys, args in calls]
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                return [await _reply(connection) for _ in calls]
        except BaseException as error:
            # What may still come on it answers nobody's question.
            await connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError("Redis did not answer in time.") from error
            raise

    async def _connected(self) -> AbstractConnection:
        """The connection, opened if it is not, or if Redis has closed it."""
        if self._connection is None:
            self._connection = await self._redis.connection_pool.get_connection()
            # One limit for a whole run: the client's own, for each reply, would cost more than the replies.
            self._answer_s, self._connection.socket_timeout = self._connection.socket_timeout, None
        elif self._connection.is_connected and await self._connection.can_read():
            await self._connection.disconnect(nowait=True)
        return self._connection


async def _reply(connection: AbstractConnection) -> Any:
    """The next reply; an error that Redis answers is one, too."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
