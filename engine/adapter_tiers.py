"""The tiers below the device: adapters on disk, and the copies of them in host memory.

A load reads an adapter from disk in a small thread pool. The loop asks for one with `want`, goes on
stepping, and learns of it from `poll`; it never waits.
"""

from __future__ import annotations

import logging
import queue
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from engine.rank_pages import pages_for_rank

logger = logging.getLogger(__name__)

NUM_LOAD_THREADS = 2
"""Two reads at once hide each other's latency; more would compete with the step for the interpreter."""
MAX_LOADS = 2 * NUM_LOAD_THREADS
"""Loads under way, queued ones included. Few, so that whoever is asked for next, in the order of fairness,
does not stand behind all the adapters that somebody else has named at once."""


class HostCopy(Protocol):
    """What the tiers need to know of an adapter in host memory; the weights themselves are the runner's."""

    @property
    def rank(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that has arrived in host memory."""

    digest: bytes
    copy: HostCopy


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """An adapter that could not be read, and why, in one sentence. A later `want` tries again."""

    digest: bytes
    reason: str


class AdapterTiers:
    """Host copies of adapters, least recently used first to go, and the loads that bring them.

    All methods belong to the loop's thread; only the reads run elsewhere.

    Args:
        read: reads and packs one adapter; called in a thread of the pool. What it raises becomes the
            reason of a `LoadFailed`.
        num_pages: rank pages of the device; an adapter that needs more can never be used, and fails.
        host_bytes: most bytes of copies kept. One adapter is kept even if it alone is larger.
        wake: called from a load's thread when `poll` has something new.
    """

    def __init__(
        self,
        read: Callable[[bytes], HostCopy],
        *,
        num_pages: int,
        host_bytes: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._read = read
        self._num_pages = num_pages
        self._host_bytes = host_bytes
        self._wake = wake
        self._copies: OrderedDict[bytes, HostCopy] = OrderedDict()
        self._loading: set[bytes] = set()
        self._done: queue.SimpleQueue[Loaded | LoadFailed] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(NUM_LOAD_THREADS, thread_name_prefix="adapter-load")

    @property
    def is_loading(self) -> bool:
        """Whether `poll` will have more to tell."""
        return bool(self._loading)

    def is_loading_one(self, digest: bytes) -> bool:
        """Whether a load of this adapter is under way."""
        return digest in self._loading

    def want(self, digest: bytes) -> HostCopy | None:
        """The host copy of an adapter, or None. Then a load is under way, or there are `MAX_LOADS` others:
        ask again when one of them has ended.
        """
        copy = self._copies.get(digest)
        if copy is not None:
            self._copies.move_to_end(digest)
        elif digest not in self._loading and len(self._loading) < MAX_LOADS:
            self._loading.add(digest)
            self._pool.submit(self._load, digest)
        return copy

    def poll(self) -> list[Loaded | LoadFailed]:
        """The loads that have ended since the last call. Loaded ones are in host memory now.

        Older copies beyond the budget are dropped; the last one loaded never is.
        """
        ended: list[Loaded | LoadFailed] = []
        while not self._done.empty():
            outcome = self._done.get_nowait()
            self._loading.discard(outcome.digest)
            if isinstance(outcome, Loaded):
                self._copies[outcome.digest] = outcome.copy
            ended.append(outcome)
        if ended:
            self._trim()
        return ended

    def discard(self, digest: bytes) -> None:
        """Drops the host copy, if there is one."""
        self._copies.pop(digest, None)

    def held(self) -> dict[bytes, HostCopy]:
        """What is in host memory now, by digest."""
        return dict(self._copies)

    def close(self) -> None:
        """Lets running reads finish unheard and starts no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, digest: bytes) -> None:
        outcome: Loaded | LoadFailed
        try:
            copy = self._read(digest)
            need = pages_for_rank(copy.rank)
            if need > self._num_pages:
                outcome = LoadFailed(
                    digest,
                    f"the adapter has rank {copy.rank} and needs {need} rank pages, but this engine has "
                    f"{self._num_pages}; start it with a larger --lora-memory-bytes",
                )
            else:
                outcome = Loaded(digest, copy)
        except OSError as error:
            # Its text has a path, which is no client's business: the log has it.
            logger.warning("adapter %s did not load: %s", digest.hex()[:12], error)
            reason = f"the adapter's files could not be read ({error.strerror or type(error).__name__})"
            outcome = LoadFailed(digest, reason)
        except Exception as error:
            logger.warning("adapter %s did not load: %s", digest.hex()[:12], error)
            outcome = LoadFailed(digest, str(error) or type(error).__name__)
        self._done.put(outcome)
        self._wake()

    def _trim(self) -> None:
        total = sum(copy.nbytes for copy in self._copies.values())
        while total > self._host_bytes and len(self._copies) > 1:
            _, copy = self._copies.popitem(last=False)
            total -= copy.nbytes
