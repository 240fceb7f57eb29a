"""How long a gateway goes on with a batch: two signals to its lines, and how many of them can only wait."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Turn:
    """One turn of a batch. For one event loop."""

    def __init__(self) -> None:
        self._resting = asyncio.Event()
        self._stopped = asyncio.Event()
        self.paused = 0
        """Lines that wait to be tried again."""

    @property
    def is_resting(self) -> bool:
        """Whether no line begins any more, nor is tried again. What runs may go on."""
        return self._resting.is_set()

    @property
    def is_stopped(self) -> bool:
        """Whether what runs ends, too."""
        return self._stopped.is_set()

    def rest(self) -> None:
        """Lets what runs be the last."""
        self._resting.set()

    def stop(self) -> None:
        """Ends what runs as well."""
        self._resting.set()
        self._stopped.set()

    async def stopped(self) -> None:
        """Returns once it is stopped."""
        await self._stopped.wait()

    async def pause(self, seconds: float) -> None:
        """Waits before a line is tried again; no longer than until it rests."""
        self.paused += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._resting.wait()
        finally:
            self.paused -= 1
