"""Copies of adapters to the device: how many before a step, who goes for them, and which are on their way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.adapter_counters import AdapterCounters
from engine.host_copy import HostCopy
from engine.rank_pages import RankPages

logger = logging.getLogger(__name__)

PLACEMENTS_PER_STEP = {"cpu": 1, "cuda": 4}
"""Most adapters copied to the device before a step that others wait for. On a CPU the step waits for each. On
a GPU they are copied beside it, and only launched before it; there more than one sequence ends in a step of
hundreds, and each may be followed by one whose adapter is not there."""

WriteAdapter = Callable[[Sequence[int], Any], Callable[[], bool] | None]
"""``Runner.write_adapter``: fills pages that nobody references, from a copy that the tiers have read. What it
returns says whether the copy has landed; None: it has."""
DropAdapter = Callable[[Sequence[int]], None]
"""``Runner.drop_adapter``: gives back what an adapter in these pages has outside them."""


class Placements:
    """Places adapters in the pages of `RankPages`, and evicts them, with their weights.

    Args:
        write: called with pages that nobody references; what it raises fails the adapter.
        drop: called when an adapter with weights outside its pages has left them.
        per_step: most that are placed before a step; all that there is room for where `idle`.
    """

    def __init__(
        self,
        pages: RankPages,
        write: WriteAdapter,
        drop: DropAdapter,
        counters: AdapterCounters,
        *,
        per_step: int,
    ) -> None:
        self._pages = pages
        self._write = write
        self._drop = drop
        self._counters = counters
        self._per_step = per_step
        self._left = 0
        self._idle = True
        self._landing: dict[bytes, Callable[[], bool]] = {}

    def begin_step(self, *, idle: bool) -> None:
        """Another step is planned. Forgets the copies that have landed; ``idle`` as of `note_idle`."""
        self._left = self._per_step
        self.note_idle(idle)
        if self._landing:
            self._landing = {digest: landed for digest, landed in self._landing.items() if not landed()}

    def note_idle(self, idle: bool) -> None:
        """Whether no sequence runs, so that copies delay nobody."""
        self._idle = idle
        if idle:
            self._left = self._pages.num_pages

    @property
    def may_place(self) -> bool:
        """Whether one more may be placed before this step."""
        return self._left > 0

    def is_usable(self, digest: bytes) -> bool:
        """Whether the step may have a row of an adapter on the device. It would wait for a copy that has not
        landed; that may delay whoever asked, and nobody else.
        """
        return self._idle or digest not in self._landing

    def make_room(self, copy: HostCopy) -> bool:
        """Lets those leave that nobody uses and that stand in this adapter's way. False: none may."""
        victims = self._pages.victims(copy)
        for victim in victims or ():
            self._counters.note_evicted(victim)
            self.evict(victim, for_room=True)
        return victims is not None

    def place(self, digest: bytes, copy: HostCopy) -> str:
        """Starts to put an adapter on the device, where there is room for it. Returns "", or the fault."""
        adapter = self._pages.place(digest, copy)
        self._left -= 1
        begin = time.monotonic()
        try:
            landed = self._write(adapter.pages, copy)
        except Exception as error:
            logger.exception("adapter %s could not be copied to the device", digest.hex()[:12])
            self.evict(digest)
            return f"the adapter could not be copied to the device: {error}"
        self._counters.copies += 1
        self._counters.copy_seconds += time.monotonic() - begin
        if landed is not None and not landed():
            self._landing[digest] = landed
        return ""

    def evict(self, digest: bytes, *, for_room: bool = False) -> None:
        """Takes an adapter that nobody uses off the device; ``for_room`` as of `RankPages.evict`."""
        self._landing.pop(digest, None)
        adapter = self._pages.evict(digest, for_room=for_room)
        if adapter.has_ends:
            self._drop(adapter.pages)
