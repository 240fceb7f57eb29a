"""Background tasks end in silence when they are told to, and not by a fault."""

from __future__ import annotations

import asyncio

import pytest

from gateway import tasks


async def test_a_task_that_ends_by_a_fault_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise KeyError("what nobody has expected")

    await asyncio.wait([tasks.start(work(), "engine-leases")])
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.levelname == "CRITICAL" and record.exc_info
    assert "'engine-leases' has ended by a fault; restart this gateway" in record.message


async def test_one_that_is_cancelled_or_done_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def work(seconds: float) -> None:
        await asyncio.sleep(seconds)

    running, done = tasks.start(work(3600), "long"), tasks.start(work(0), "short")
    await done
    await tasks.cancel(running)
    await asyncio.sleep(0)
    assert running.cancelled() and not caplog.records
