"""The tiers below the device: adapters on disk, and the copies of them in host memory.

A load reads an adapter in a small thread pool: from the local disk, or from the store when it is not there.
The loop asks for one with `want`, goes on stepping, and learns of it from `poll`; it never waits.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from engine.adapter_counters import AdapterCounters
from engine.eviction import GreedyDual, reload_cost
from engine.host_copy import HostCopy
from engine.load_outcomes import Loaded, LoadFailed, failed_by

logger = logging.getLogger(__name__)

NUM_LOAD_THREADS = 16
"""So many wait for a store at once; of those, fewer compute (`engine.adapter_readers`). Enough for eight
tenants whose reads hang all at once."""
MAX_LOADS = 6
"""Loads under way of one tenant; a part of it, at least one, where others have loads as well. So who reads
from a slow store keeps nobody from a place. Few, so that whoever is asked for next, in the order of
fairness, does not stand behind all the adapters that somebody else has named at once."""

MAX_AHEAD = MAX_LOADS // 2
"""Of these, those that are begun ahead of the loop, or for no request: the others are kept for requests."""
MAX_HANGING = NUM_LOAD_THREADS - MAX_LOADS
"""Reads that hang do not count in `MAX_AHEAD`, unless so few threads are left as one tenant may need."""

READ_SECONDS = 60.0
"""After so long, those who wait for a read of the local disk are told that it hangs. What a remote store
takes is for that store to bound, and the wait for a place does not count."""


class AdapterTiers:
    """Host copies of adapters, and the loads that bring them.

    Copies beyond the budget go in the order of `GreedyDual`, where what is small and was used lately stays;
    pinned ones go last. All methods but `begin` belong to the loop's thread; the reads run elsewhere.

    Args:
        read: reads and packs one adapter, given what `fetch` has; called in a thread of the pool. What these
            raise becomes the reason of a `LoadFailed`.
        fetch: brings an adapter to the local disk, and keeps it there while it is read.
        place: for the time of a read; entering it may wait for others.
        is_local: whether `read` would find it on the local disk; called there too.
        discard: drops a cached copy from the local disk, if there is one; called there too.
        num_pages, ends_bytes: the device's room; an adapter that needs more can never be used, and fails.
        host_bytes: most bytes of copies kept. One adapter is kept even if it alone is larger.
        wake: called from a load's thread when `poll` has something new.
    """

    def __init__(
        self,
        read: Callable[[Any], HostCopy],
        *,
        fetch: Callable[[bytes], AbstractContextManager[Any]] = nullcontext,
        place: Callable[[], AbstractContextManager[None]] = nullcontext,
        num_pages: int,
        host_bytes: int,
        ends_bytes: int = 0,
        is_local: Callable[[bytes], bool] = lambda digest: True,
        discard: Callable[[bytes], None] = lambda digest: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.counters = AdapterCounters()
        self._read = read
        self._fetch = fetch
        self._place = place
        self._is_local = is_local
        self._discard_local = discard
        self._num_pages = num_pages
        self._ends_bytes = ends_bytes
        self._host_bytes = host_bytes
        self._wake = wake
        self._copies: dict[bytes, HostCopy] = {}
        self._copied_bytes = 0
        self._order = GreedyDual()
        self._pinned: Collection[bytes] = ()
        self._crowded_out: list[bytes] = []
        self._loading: dict[bytes, Future[None]] = {}
        self._forgetting: set[bytes] = set()
        self._tenants: dict[bytes, str] = {}  # for whom each of them is; "": nobody who is known yet
        self._reading: dict[bytes, float] = {}  # since when, of the local disk; written by the pool's threads
        self._told: set[bytes] = set()  # of these, those whose read is known to hang
        self._begun: dict[bytes, Future[None]] = {}  # by `begin`, and not known to the loop's thread yet
        self._lock = threading.Lock()  # over who begins a load, and who takes one in
        self._done: queue.SimpleQueue[Loaded | LoadFailed | bytes] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(NUM_LOAD_THREADS, thread_name_prefix="adapter-load")

    # ---- what is here -------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether `poll` will have more to tell."""
        return bool(self._loading or self._forgetting)

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies in host memory now."""
        return self._copied_bytes

    def loading(self) -> list[bytes]:
        """The adapters whose load is under way or queued."""
        return list(self._loading)

    def is_loading_one(self, digest: bytes) -> bool:
        """Whether a load of this adapter is under way or queued."""
        return digest in self._loading or digest in self._begun

    def lets_ahead(self, num_waiting: Callable[[bytes], int]) -> bool:
        """Whether one more load may begin that nobody waits for."""
        ahead = [digest for digest in self._loading if not num_waiting(digest)]
        return self._has_room(ahead, MAX_AHEAD)

    def hanging(self, digest: bytes) -> LoadFailed | None:
        """What has been told of a load whose read hangs; None where none is known to."""
        return _hangs(digest) if digest in self._told else None

    @property
    def next_look(self) -> float | None:
        """When `poll` may have to tell of a read that hangs, by the monotonic clock."""
        since = [begun for digest, begun in self._reading.copy().items() if digest not in self._told]
        if len(since) < len(self._loading.keys() - self._told):
            since.append(time.monotonic())  # some may begin to be read at any time
        return min(since) + READ_SECONDS if since else None

    def has(self, digest: bytes) -> bool:
        """Whether the adapter is in host memory. Unlike `want`, no use of it."""
        return digest in self._copies

    def held(self) -> dict[bytes, HostCopy]:
        """What is in host memory now, by digest."""
        return dict(self._copies)

    # ---- what changes it ----------------------------------------------------------------------------

    def begin(self, digest: bytes) -> None:
        """Begins a load at once, from whatever thread, if fewer than `MAX_AHEAD` are under way.

        So it need not wait for the step that the loop is busy with. The loop learns of it with the next
        `want` or `poll`; it is a load like all others from then on.
        """
        with self._lock:
            under_way = self._loading.keys() | self._begun.keys()
            is_known = digest in self._copies or digest in under_way or digest in self._forgetting
            if not is_known and self._has_room(under_way, MAX_AHEAD):
                self._begun[digest] = self._pool.submit(self._load, digest)

    def want(self, digest: bytes, tenant: str = "") -> HostCopy | None:
        """The host copy of an adapter, or None. Then a load is under way, or the tenant has its share of
        them, or the last copy is being forgotten: ask again when one of them has ended.

        A load counts as the first tenant's that wants it; "" stands for what is brought for no request.
        """
        copy = self._copies.get(digest)
        if copy is not None:
            self._order.use(digest)
            return copy
        with self._lock:
            self._take_over()
            is_known = digest in self._loading or digest in self._forgetting
            if not is_known and self._has_share(tenant):
                self._loading[digest] = self._pool.submit(self._load, digest)
            if digest in self._loading and not self._tenants.get(digest):
                self._tenants[digest] = tenant
        return None

    def _has_room(self, loads: Collection[bytes], most: int) -> bool:
        """Whether of these loads fewer than so many are under way in earnest, and do not hang."""
        return sum(digest not in self._told for digest in loads) < most and len(loads) < MAX_HANGING

    def _has_share(self, tenant: str) -> bool:
        """Whether one more load may begin for a tenant."""
        own = sum(other == tenant for other in self._tenants.values())
        return own < max(1, MAX_LOADS // len({*self._tenants.values(), tenant}))

    def _take_over(self) -> None:
        """Makes the loads that others have begun the loop's own."""
        self._loading.update(self._begun)
        self._tenants.update(dict.fromkeys(self._begun, ""))
        self._begun.clear()

    def cancel(self, digest: bytes) -> None:
        """Drops a load that has not begun; one that has goes on, and its copy is kept."""
        if self._loading[digest].cancel():
            del self._loading[digest], self._tenants[digest]
            self.counters.loads_cancelled += 1

    def poll(self, num_waiting: Callable[[bytes], int] = lambda digest: 0) -> list[Loaded | LoadFailed]:
        """The loads that have ended since the last call; loaded adapters are in host memory, as room allows.
        A read that hangs is told as a failure, and goes on.

        Copies beyond the budget are dropped: first those that no sequence waits for, or one that waits could
        be kept from its adapter for ever, by others that are read ahead. The last one loaded goes last of
        its kind.

        Args:
            num_waiting: how many sequences wait for an adapter.
        """
        with self._lock:
            self._take_over()
        ended: list[Loaded | LoadFailed] = []
        while not self._done.empty():
            outcome = self._done.get_nowait()
            if isinstance(outcome, bytes):
                self._forgetting.discard(outcome)
                continue
            with self._lock:
                self._take_over()
                self._loading.pop(outcome.digest, None)
                self._tenants.pop(outcome.digest, None)
                if isinstance(outcome, Loaded):
                    self._copies[outcome.digest] = outcome.copy
            was_told = outcome.digest in self._told
            self._told.discard(outcome.digest)
            if isinstance(outcome, Loaded):
                self._note(outcome, num_waiting)
            elif not was_told:
                self.counters.loads_failed += 1
            ended.append(outcome)
        return ended + self._hanging(num_waiting)

    def _hanging(self, num_waiting: Callable[[bytes], int]) -> list[Loaded | LoadFailed]:
        """A failure for each read that hangs, once and whenever somebody waits for it. It stays under way, so
        that nobody begins another that would hang as well; if it comes to its end, that is told.
        """
        failures: list[Loaded | LoadFailed] = []
        latest = time.monotonic() - READ_SECONDS
        for digest, since in self._reading.copy().items():
            if since > latest or (digest in self._told and not num_waiting(digest)):
                continue
            if digest not in self._told:
                self._told.add(digest)
                self.counters.loads_failed += 1
                logger.warning("the read of adapter %s hangs", digest.hex()[:12])
            failures.append(_hangs(digest))
        return failures

    def _note(self, outcome: Loaded, num_waiting: Callable[[bytes], int]) -> None:
        self.counters.note_loaded(outcome.digest, was_local=outcome.was_local, seconds=outcome.seconds)
        self._copied_bytes += outcome.copy.nbytes
        self._order.use(outcome.digest)
        self._trim(outcome.digest, num_waiting)

    def pin(self, digests: Collection[bytes]) -> None:
        """Says which adapters go last from now on."""
        self._pinned = digests

    def take_crowded_out(self) -> list[bytes]:
        """Pinned adapters whose copies have gone since the last call, as others took all of the budget."""
        taken, self._crowded_out = self._crowded_out, []
        return taken

    def discard(self, digest: bytes) -> None:
        """Drops the host copy, if there is one."""
        copy = self._copies.pop(digest, None)
        if copy is not None:
            self._copied_bytes -= copy.nbytes
            self._order.forget(digest)

    def forget(self, digest: bytes) -> None:
        """Drops the host copy, and the one on the local disk. Not while a load of it is under way; one that
        has been begun in this moment keeps it.
        """
        assert digest not in self._loading, "forgotten while it is read"
        with self._lock:
            if digest in self._begun:
                return
            self.discard(digest)
            if digest not in self._forgetting:
                self._forgetting.add(digest)
                self._pool.submit(self._forget, digest)

    def close(self) -> None:
        """Lets running reads finish unheard and starts no more. Python would wait for them at its end: see
        `engine.__main__.end_process`.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Asserts that bytes and bounds are right."""
        assert self._copied_bytes == sum(copy.nbytes for copy in self._copies.values())
        assert self._copied_bytes <= self._host_bytes or len(self._copies) == 1
        assert not self._loading.keys() & self._copies.keys(), "a load of what is here"
        assert self._tenants.keys() == self._loading.keys()
        assert all(count <= MAX_LOADS for count in Counter(self._tenants.values()).values())

    # ---- in the pool's threads ----------------------------------------------------------------------

    def _load(self, digest: bytes) -> None:
        outcome: Loaded | LoadFailed
        begin = time.monotonic()
        self._reading[digest] = begin
        try:
            was_local = self._is_local(digest)
            if not was_local:
                del self._reading[digest]
            with self._fetch(digest) as source:
                self._reading.pop(digest, None)
                with self._place():
                    self._reading[digest] = time.monotonic()
                    copy = self._read(source)
            fault = self._fault(copy)
            if fault:
                outcome = LoadFailed(digest, fault)
            else:
                outcome = Loaded(digest, copy, was_local, time.monotonic() - begin)
        except Exception as error:
            logger.warning("adapter %s did not load: %s", digest.hex()[:12], error)
            outcome = failed_by(error, digest)
        self._reading.pop(digest, None)
        self._done.put(outcome)
        self._wake()

    def _fault(self, copy: HostCopy) -> str:
        """Why this engine can never use an adapter; "" if it can."""
        if copy.num_pages > self._num_pages:
            return (
                f"the adapter has rank {copy.rank} and needs {copy.num_pages} rank pages, but this engine "
                f"has {self._num_pages}; start it with a larger --lora-memory-bytes"
            )
        if copy.ends_bytes > self._ends_bytes:
            return (
                f"the adapter needs {copy.ends_bytes} bytes for its embedding and lm_head, but this engine "
                f"has {self._ends_bytes}; start it with a larger --lora-memory-bytes"
            )
        return ""

    def _forget(self, digest: bytes) -> None:
        try:
            self._discard_local(digest)
        except OSError as error:
            logger.warning("adapter %s stays on the local disk: %s", digest.hex()[:12], error)
        self._done.put(digest)
        self._wake()

    # ---- the bound of host memory -------------------------------------------------------------------

    def _trim(self, last: bytes, num_waiting: Callable[[bytes], int]) -> None:
        """Drops copies until they are within the budget, or one is left. ``last``: the one just loaded."""
        if self._copied_bytes <= self._host_bytes:
            return

        def rank(digest: bytes) -> tuple[bool, bool, bool]:
            return num_waiting(digest) > 0, digest == last, digest in self._pinned

        for digest in sorted(self._order.ranked(self._copies.keys(), self._read_cost), key=rank):
            if self._copied_bytes <= self._host_bytes or len(self._copies) == 1:
                return
            self._order.evicted(digest, self._read_cost)
            self._copied_bytes -= self._copies.pop(digest).nbytes
            self.counters.evictions_host += 1
            if digest in self._pinned:
                self._crowded_out.append(digest)

    def _read_cost(self, digest: bytes) -> float:
        return reload_cost(self._copies[digest].num_pages, in_host=False)


def _hangs(digest: bytes) -> LoadFailed:
    reason = f"its files could not be read in {READ_SECONDS:.0f} seconds"
    return LoadFailed(digest, reason, may_be_read_later=True)
