"""One Redis script, asked by many requests at once: those that meet share a round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError


class ScriptBatches:
    """Runs a script for its callers, in a pipeline with whoever asks while another run is under way.

    A round trip costs the event loop far more than it costs Redis, so a burst of requests is answered by two
    or three of them. Each call runs in Redis after it was made, as if it had gone alone. For one event loop.
    """

    def __init__(self, redis: Redis, script: AsyncScript) -> None:
        self._redis = redis
        self._script = script
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

    async def _run(self) -> None:
        try:
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

    async def _replies(self, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes]]]) -> Sequence[Any]:
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

    async def _send(self, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes]]]) -> list[Any]:
        # By its hash: of a script object, redis-py asks for each pipeline whether Redis has it.
        async with self._redis.pipeline(transaction=False) as pipe:
            for keys, args in calls:
                pipe.evalsha(self._script.sha, len(keys), *keys, *args)
            return await pipe.execute(raise_on_error=False)
