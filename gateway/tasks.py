"""Starts and ends background tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 1.0


def start(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts what is to run for as long as the gateway does, or until `cancel`. Returns at once.

    What its loop does not expect would end it, and asyncio keep that to itself until the gateway stops: so it
    is logged, as what wants a restart.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_of_fault)
    return task


def _tell_of_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        logger.critical(
            "the background task '%s' has ended by a fault; restart this gateway",
            task.get_name(),
            exc_info=fault,
        )


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancels tasks and returns when all have ended.

    Asks more than once: the Redis client can lose a cancellation that comes just as its own timeout fires.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=_ASK_AGAIN_S)
