"""Who may read an adapter now: few at once, and a read that hangs keeps its place for a while only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 10.0
"""Seconds for which a read may keep its place while others wait; one takes milliseconds."""


class Readers:
    """Places for so many reads at once, of many threads.

    A read of a network's file system can hang for as long as that does, and nobody can end it. So its place
    is another's after `PATIENCE_S`; should it go on after all, there is one read more than places until it
    ends.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._since: dict[object, float] = {}  # by who has a place, the first to come first
        self._changed = threading.Condition()

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place, for the time inside the context. Waits for one."""
        who = object()
        with self._changed:
            while len(self._since) == self._num_places:
                oldest, since = next(iter(self._since.items()))
                left = since + PATIENCE_S - time.monotonic()
                if left <= 0:
                    del self._since[oldest]
                else:
                    self._changed.wait(left)
            self._since[who] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._since.pop(who, None)
                self._changed.notify()
