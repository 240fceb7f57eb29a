"""Which adapters are wanted before any sequence waits for them, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

logger = logging.getLogger(__name__)

EXPECTED_SECONDS = 5.0
"""How long an announced request is waited for; it comes within milliseconds, or its client has gone."""
MAX_EXPECTED = 16
"""Announcements beyond so many are ignored: their loads would come later than the requests."""
PIN_RETRY_SECONDS = 30.0
"""After how long a pinned adapter that could not be brought, or found no room, is tried again."""


class Ahead:
    """Prefetches, pins and announcements. Holds wishes, no resources; the gate acts on them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._prefetches: dict[bytes, list[Future[str]]] = {}
        self._expected: dict[bytes, float] = {}
        self._retry_at: dict[bytes, float] = {}
        self._is_crowded = False
        self.pinned: frozenset[bytes] = frozenset()

    def wants(self, digest: bytes) -> bool:
        """Whether a load of this adapter has a purpose, though no sequence waits for it."""
        return digest in self._prefetches or digest in self._expected or digest in self.pinned

    # ---- prefetches ---------------------------------------------------------------------------------

    def prefetch(self, digest: bytes, answer: Future[str]) -> None:
        """Somebody wants to know when the adapter is on the device."""
        self._prefetches.setdefault(digest, []).append(answer)

    def prefetched(self) -> list[bytes]:
        """The adapters of prefetches that are not answered, without those whose askers have all gone."""
        if not self._prefetches:
            return []
        waiting = {
            digest: [answer for answer in answers if not answer.cancelled()]
            for digest, answers in self._prefetches.items()
        }
        self._prefetches = {digest: answers for digest, answers in waiting.items() if answers}
        return list(self._prefetches)

    def answer(self, digest: bytes, fault: str) -> None:
        """Ends the prefetches of an adapter; one that is pinned rests for a while after a fault."""
        for answer in self._prefetches.pop(digest, []):
            if answer.set_running_or_notify_cancel():
                answer.set_result(fault)
        if fault:
            self._expected.pop(digest, None)
            if digest in self.pinned:
                self._retry_at[digest] = self._clock() + PIN_RETRY_SECONDS

    # ---- pins ---------------------------------------------------------------------------------------

    def pin(self, digests: frozenset[bytes]) -> None:
        """These are pinned from now on, and no others."""
        if digests != self.pinned:
            self._is_crowded = False
        self.pinned = digests
        self._retry_at = {digest: at for digest, at in self._retry_at.items() if digest in digests}

    def to_pin(self, are_pinned: frozenset[bytes]) -> list[bytes]:
        """The adapters to pin that are not yet, without those that rest: they could not be brought, or had no
        room, a while ago.
        """
        missing = self.pinned - are_pinned
        if not missing:
            return []
        now = self._clock()
        return sorted(digest for digest in missing if self._retry_at.get(digest, now) <= now)

    def has_no_room(self, digest: bytes) -> None:
        """A pinned adapter was read, and had to go again; it rests for a while. The log has the first."""
        if digest not in self.pinned:
            return
        self._retry_at[digest] = self._clock() + PIN_RETRY_SECONDS
        if not self._is_crowded:
            self._is_crowded = True
            logger.warning(
                "memory has no room for all %d pinned adapters, so some are not kept; "
                "raise --lora-memory-bytes or --lora-host-memory-bytes, or pin fewer",
                len(self.pinned),
            )

    # ---- announcements ------------------------------------------------------------------------------

    def expect(self, digest: bytes) -> None:
        """A request for this adapter has been announced."""
        if digest in self._expected or len(self._expected) < MAX_EXPECTED:
            self._expected[digest] = self._clock() + EXPECTED_SECONDS

    def has_come(self, digest: bytes) -> None:
        """The request that was announced is here, and wants for itself."""
        self._expected.pop(digest, None)

    def expected(self) -> list[bytes]:
        """The adapters that were announced, without those whose time has passed."""
        if not self._expected:
            return []
        now = self._clock()
        self._expected = {digest: until for digest, until in self._expected.items() if now < until}
        return list(self._expected)

    def forget(self, digest: bytes) -> None:
        """Nobody wants the adapter ahead of need any more; prefetches that wait do."""
        self._expected.pop(digest, None)
        self.pinned -= {digest}
