"""Which sequences' adapters are on the device, and how the others get there.

A sequence whose adapter is not on the device steps aside: the load is started, and nobody waits for it.
When the adapter is in host memory but all pages are referenced, it must not be passed over for ever, since
others' sequences could keep those pages referenced without end. So the first such adapter, in the order of
admission, makes a *claim*: it names as victims the residents that nobody uses, and of the others those
whose running sequences will end soonest, just enough of them. Until it has its pages, no further sequence
of a victim is admitted and no other adapter is placed; everyone else goes on.

The bound: a claimed adapter has its pages once the victims' running sequences have ended, so after at most
as many steps as the longest of them still needs, and then keeps them until its first sequence runs. One
claim stands at a time; the order of admission, which is fair, decides whose is next.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.adapter_tiers import AdapterTiers, HostCopy, LoadFailed
from engine.rank_pages import RankPages, pages_for_rank
from engine.step import StepAdapter

logger = logging.getLogger(__name__)

PLACEMENTS_PER_STEP = 1
"""Most adapters copied to the device before a step that others wait for: a copy is as long as a step."""

WriteAdapter = Callable[[Sequence[int], Any], None]
"""``Runner.write_adapter``: fills pages that nobody references, from a copy that the tiers have read."""


class Residency(enum.IntEnum):
    """The fastest tier that holds an adapter; the numbers are the wire's."""

    NONE = 0
    DISK = 1
    HOST = 2
    DEVICE = 3


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """Where an adapter is, and who uses it."""

    digest: bytes
    residency: Residency
    rank: int
    num_pages: int
    references: int


@dataclass(slots=True)
class _Claim:
    digest: bytes
    copy: HostCopy
    victims: frozenset[bytes]
    placed: bool = False
    """The pages are the claimant's, and a reference keeps them so until its first sequence has one."""


class AdapterGate:
    """Brings adapters to the device and says whether a sequence's adapter is there.

    Args:
        pages: owned by the gate from here on; nobody else places, acquires or evicts.
        tiers: where adapters come from.
        write: called with pages that nobody references; what it raises fails the adapter.
    """

    def __init__(self, pages: RankPages, tiers: AdapterTiers, write: WriteAdapter) -> None:
        self._pages = pages
        self._tiers = tiers
        self._write = write
        self._claim: _Claim | None = None
        self._placements_left = 0
        self._failures: list[LoadFailed] = []
        self._prefetches: dict[bytes, list[Callable[[str], None]]] = {}
        self._unloading: set[bytes] = set()

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way; its end may let a sequence start."""
        return self._tiers.is_loading

    def begin_step(self, num_waiting: Callable[[bytes], int], *, idle: bool) -> None:
        """Takes in the loads that have ended, and gives the claimant its pages if they are there.

        Args:
            num_waiting: how many sequences wait for an adapter now.
            idle: no sequence runs, so copies to the device delay nobody.
        """
        self._placements_left = self._pages.num_pages if idle else PLACEMENTS_PER_STEP
        for outcome in self._tiers.poll():
            if isinstance(outcome, LoadFailed):
                self._fail(outcome)
        self._advance_claim(num_waiting)
        for digest in list(self._prefetches):
            if self._bring(digest):
                self._answer(digest, "")
        for digest in [digest for digest in self._unloading if not num_waiting(digest)]:
            self._forget_if_unused(digest)

    def take_failures(self) -> list[LoadFailed]:
        """Adapters that could not be brought since the last call; their waiting sequences must end."""
        taken, self._failures = self._failures, []
        return taken

    def want(self, digest: bytes) -> None:
        """Says that a sequence for this adapter has come, so that its load starts now if there is room."""
        if not digest:
            return
        self._unloading.discard(digest)
        if self._pages.resident(digest) is None:
            self._tiers.want(digest)

    def is_open(self, digest: bytes, remaining_steps: Callable[[], Mapping[bytes, int]]) -> bool:
        """Whether a sequence of this adapter may start now. If not, sees to it that one will.

        ``remaining_steps`` gives, by adapter, how long its running sequences may take yet.
        """
        if not digest:
            return True
        claim = self._claim
        if claim is not None and digest in claim.victims:
            return False
        if self._bring(digest):
            return True
        copy = self._tiers.want(digest)
        if copy is not None and claim is None and self._placements_left:
            self._claim = self._make_claim(digest, copy, remaining_steps())
        return False

    def acquire(self, digest: bytes) -> StepAdapter | None:
        """One more running sequence uses an adapter that `is_open`; None for the base model."""
        if not digest:
            return None
        adapter = self._pages.acquire(digest)
        if self._claim is not None and self._claim.digest == digest:
            self._end_claim()
        return adapter

    def release(self, digest: bytes) -> None:
        """A sequence that acquired the adapter runs no more."""
        if digest:
            self._pages.release(digest)

    def prefetch(self, digest: bytes, done: Callable[[str], None]) -> None:
        """Brings an adapter to the device when there is room, then calls ``done`` with "" or the fault."""
        self.want(digest)
        self._prefetches.setdefault(digest, []).append(done)

    def unload(self, digest: bytes) -> None:
        """Forgets an adapter once no sequence runs or waits with it. A new sequence keeps it after all."""
        self._unloading.add(digest)

    def statuses(self) -> list[AdapterStatus]:
        """Every adapter in host or device memory."""
        on_device = self._pages.residents()
        in_host = self._tiers.held()
        found = [
            AdapterStatus(digest, Residency.DEVICE, a.rank, len(a.pages), self._pages.references(digest))
            for digest, a in on_device.items()
        ]
        found += [
            AdapterStatus(digest, Residency.HOST, copy.rank, 0, 0)
            for digest, copy in in_host.items()
            if digest not in on_device
        ]
        return found

    def check(self, users: list[bytes]) -> None:
        """Asserts the invariants of the pages. ``users``: the adapter of each sequence that acquired one."""
        reserved = [self._claim.digest] if self._claim is not None and self._claim.placed else []
        self._pages.check(users + reserved)

    def _bring(self, digest: bytes) -> bool:
        """Puts an adapter on the device if it is not there and nothing stands in the way."""
        if self._pages.resident(digest) is not None:
            return True
        claim = self._claim
        copy = claim.copy if claim is not None and claim.digest == digest else self._tiers.want(digest)
        if copy is None or not self._placements_left:
            return False
        if claim is not None and claim.digest != digest and not claim.placed:
            return False
        adapter = self._pages.place(digest, copy.rank)
        if adapter is None:
            return False
        self._placements_left -= 1
        try:
            self._write(adapter.pages, copy)
        except Exception as error:
            logger.exception("adapter %s could not be copied to the device", digest.hex()[:12])
            self._pages.evict(digest)
            self._tiers.discard(digest)
            self._fail(LoadFailed(digest, f"the adapter could not be copied to the device: {error}"))
            return False
        return True

    def _make_claim(self, digest: bytes, copy: HostCopy, remaining: Mapping[bytes, int]) -> _Claim:
        """Chooses victims: what nobody uses, then of the adapters in use those that end soonest, until
        their pages suffice."""
        missing = pages_for_rank(copy.rank) - self._pages.num_available
        victims = {other for other in self._pages.residents() if not self._pages.references(other)}
        for victim in sorted(remaining, key=lambda other: remaining[other]):
            if missing <= 0:
                break
            resident = self._pages.resident(victim)
            assert resident is not None, "a sequence runs with an adapter that is not on the device"
            victims.add(victim)
            missing -= len(resident.pages)
        return _Claim(digest, copy, frozenset(victims))

    def _advance_claim(self, num_waiting: Callable[[bytes], int]) -> None:
        claim = self._claim
        if claim is None:
            return
        if not num_waiting(claim.digest):
            self._end_claim()
        elif not claim.placed and self._bring(claim.digest):
            self._pages.acquire(claim.digest)
            claim.placed = True
            claim.victims = frozenset()

    def _end_claim(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None and claim.placed:
            self._pages.release(claim.digest)

    def _fail(self, failure: LoadFailed) -> None:
        if self._claim is not None and self._claim.digest == failure.digest:
            self._end_claim()
        self._failures.append(failure)
        self._answer(failure.digest, failure.reason)

    def _answer(self, digest: bytes, fault: str) -> None:
        for done in self._prefetches.pop(digest, []):
            done(fault)

    def _forget_if_unused(self, digest: bytes) -> None:
        if self._pages.references(digest) or self._tiers.is_loading_one(digest):
            return
        self._unloading.discard(digest)
        self._tiers.discard(digest)
        if self._pages.resident(digest) is not None:
            self._pages.evict(digest)
