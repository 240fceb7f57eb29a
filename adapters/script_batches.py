"""One Redis script, asked by many requests at once: those that meet share a round trip."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from adapters.redis_wire import RedisWire, packed


@dataclass(slots=True)
class _Call:
    command: bytes
    answer: asyncio.Future[Any]
    broke: bool = False  # it was under way when a connection broke
    unknown: bool = False  # Redis has said once that it does not know the script

    def resolve(self, reply: Any) -> None:
        """Gives the caller its reply or exception, unless it has gone."""
        if self.answer.done():
            return
        if isinstance(reply, Exception):
            self.answer.set_exception(reply)
        else:
            self.answer.set_result(reply)


class ScriptBatches:
    """Runs a script for its callers, in a pipeline with whoever asks while another run is under way.

    A round trip costs the event loop far more than it costs Redis, so a burst of requests is answered by two
    or three of them. Each call runs in Redis after it was made, as if it had gone alone; one whose connection
    breaks meanwhile is repeated once, so that it may run twice. For one event loop.

    Keeps a connection of the client's for itself from its first call on, which ends with the client's pool.
    """

    def __init__(self, redis: Redis, script: AsyncScript) -> None:
        self._redis = redis
        self._script = script
        self._connection: AbstractConnection | None = None
        self._wire: RedisWire | None = None
        self._waiting: list[_Call] = []
        self._under_way: list[_Call] = []
        self._task: asyncio.Task[None] | None = None  # what connects, or teaches Redis the script

    def __call__(self, keys: Sequence[str], args: Sequence[str | bytes]) -> asyncio.Future[Any]:
        """Asks at once. Await the script's reply, or what Redis or the connection raises."""
        # By its hash: of a script object, redis-py asks for each call whether Redis has it.
        command = packed("EVALSHA", self._script.sha, len(keys), *keys, *args)
        call = _Call(command, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._send()
        return call.answer

    def prepare(self) -> None:
        """Begins to connect and to teach Redis the script, so that a first burst of calls waits for neither.

        Does not fail where Redis is away.
        """
        if self._task is None and self._wire is None:
            self._begin(self._prepare())

    def _send(self) -> None:
        """Sends all that waits, unless what is under way has to end first."""
        if self._under_way or self._task is not None:
            return
        if not (batch := [call for call in self._waiting if not call.answer.done()]):
            return
        if self._wire is None or not self._wire.open:
            self._begin(self._connect())
            return
        self._waiting, self._under_way = [], batch
        self._wire.ask([call.command for call in batch])

    def _on_replies(self, replies: Sequence[Any]) -> None:
        batch, self._under_way = self._under_way, []
        again = []
        for call, reply in zip(batch, replies, strict=True):
            if isinstance(reply, NoScriptError) and not call.unknown:
                call.unknown = True
                again.append(call)
            else:
                call.resolve(reply)
        if again:
            self._waiting = again + self._waiting
            self._begin(self._teach())
        else:
            self._send()

    def _on_failure(self, error: Exception) -> None:
        batch, self._under_way = self._under_way, []
        again = []
        for call in batch:
            if isinstance(error, RedisConnectionError) and not call.broke:
                call.broke = True
                again.append(call)
            else:
                call.resolve(error)
        self._waiting = again + self._waiting
        self._send()

    # ---- what takes more than one step --------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._finish(work), name="script-batches")

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Does what must be done before the next batch. Where that fails, all that waits for it fails."""
        try:
            await work
        except Exception as error:
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call.resolve(error)
        finally:
            self._task = None
        self._send()

    async def _connect(self) -> None:
        if self._connection is None:
            self._connection = await self._redis.connection_pool.get_connection()
        elif self._wire is not None:  # redis-py does not know yet that it broke
            await self._connection.disconnect(nowait=True)
        self._wire = await RedisWire.over(
            self._connection, on_replies=self._on_replies, on_failure=self._on_failure
        )

    async def _teach(self) -> None:
        await self._redis.script_load(self._script.script)

    async def _prepare(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._connect()
            await self._teach()
