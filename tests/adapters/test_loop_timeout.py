"""A timeout of time in which the loop turned."""

from __future__ import annotations

import asyncio
import time

import pytest

from adapters.loop_timeout import LoopTimeout


async def test_what_takes_too_long_ends_with_an_error() -> None:
    with pytest.raises(TimeoutError):
        async with LoopTimeout(0.05):
            await asyncio.sleep(60)


async def test_an_answer_that_came_while_the_loop_stood_still_counts() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()
    async with LoopTimeout(0.05):
        loop.call_later(0.01, answer.set_result, "here")
        loop.call_soon(time.sleep, 0.2)
        assert await answer == "here"


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def wait() -> None:
        async with LoopTimeout(60):
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_after_its_block_nothing_is_cancelled() -> None:
    async with LoopTimeout(0.02):
        pass
    await asyncio.sleep(0.05)
    current = asyncio.current_task()
    assert current is not None and not current.cancelling()
