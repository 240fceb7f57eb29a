"""Records once a second what running requests have used so far, so that no crash loses more than that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway import tasks
from gateway.accounts.entry import LedgerEntry, Settlement
from gateway.accounts.settle import LedgerScript
from gateway.accounts.writer import LedgerWriter

_AT_ONCE = 100


class Renewer:
    """Knows the running requests, and has the writer record each of them at a steady pace.

    Each record renews the request's lease as well: while it holds, nobody takes the request for lost.
    """

    def __init__(self, writer: LedgerWriter, script: LedgerScript, *, every_s: float) -> None:
        self._writer = writer
        self._script = script
        self._every_s = every_s
        self._running: dict[str, tuple[LedgerEntry, Callable[[], Settlement]]] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, entry: LedgerEntry, so_far: Callable[[], Settlement]) -> None:
        """Records this request from now on, as it would be settled if it ended then."""
        self._running[entry.id] = entry, so_far

    def remove(self, entry: LedgerEntry) -> bool:
        """Stops recording a request. Returns whether it was recorded until now."""
        return self._running.pop(entry.id, None) is not None

    def start(self) -> None:
        """Starts the task."""
        self._task = tasks.start(self._run(), "ledger-renewer")

    async def close(self) -> None:
        """Ends the task."""
        if self._task is not None:
            await tasks.cancel(self._task)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self._script.list_again()
            await self.record()

    async def record(self) -> None:
        """Has the writer record every running request, some at a time: streams go on in between."""
        for number, name in enumerate(list(self._running), start=1):
            if name in self._running:  # else it has ended meanwhile
                entry, so_far = self._running[name]
                entry.settle(so_far())
                self._writer.progress(entry)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
