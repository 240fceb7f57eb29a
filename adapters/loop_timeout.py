"""A bound on waiting that a busy event loop does not use up."""

from __future__ import annotations

import asyncio
from types import TracebackType

_TICKS = 10


class LoopTimeout:
    """As `asyncio.timeout`, but only time in which the loop comes round counts.

    A loop that was held up for long finds the answer and the alarm at the same moment, and `asyncio.timeout`
    then believes the alarm: under load, a server that has answered would be taken for one that is away. Here
    the alarm needs ten short periods, and however long a turn of the loop takes, it ends one of them at most.
    """

    def __init__(self, seconds: float | None) -> None:
        """`seconds` None: no bound."""
        self._tick_s = None if seconds is None else seconds / _TICKS
        self._left = _TICKS
        self._task: asyncio.Task[object] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> LoopTimeout:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancels = self._task.cancelling()
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._left == 0 and self._task is not None:
            # Somebody else may want the task's end as well; then that goes on.
            alone = self._task.uncancel() <= self._cancels
            if alone and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise TimeoutError from error

    def _arm(self) -> None:
        if self._tick_s is not None:
            self._alarm = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._left -= 1
        if self._left:
            self._arm()
        elif self._task is not None:
            self._task.cancel()
