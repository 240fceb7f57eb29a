"""How an adapter is read, and who may read one now: few at once, and none keeps a place for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.model.adapter_reading import read_adapter, read_as_stored
from engine.model.adapter_weights import HostAdapter
from engine.model.llama import LlamaModel
from kernels.native import release_threads

NUM_READERS = 2
"""Who lays weights out competes with the step for cores and for the interpreter."""
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


def reader_of(network: LlamaModel) -> Callable[[Path], HostAdapter]:
    """How `AdapterTiers` reads the files of an adapter for the network's device."""

    def read(folder: Path) -> HostAdapter:
        try:
            if network.device.type == "cuda":
                return read_adapter(folder, network, pin=True)
            return read_as_stored(folder, network)
        finally:
            release_threads()

    return read
