"""Ends background tasks."""

from __future__ import annotations

import asyncio

_ASK_AGAIN_S = 1.0


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancels tasks and returns when all have ended.

    Asks more than once: the Redis client can lose a cancellation that comes just as its own timeout fires.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=_ASK_AGAIN_S)
