"""Which sequences' adapters are on the device, and how the others get there.

A sequence whose adapter is not on the device steps aside: the load is started, and nobody waits for it.
When the adapter is in host memory but all pages are referenced, it must not be passed over for ever, since
others' sequences could keep those pages referenced without end. So the first such adapter, in the order of
admission, makes a *claim*: it names as victims the residents that nobody uses, and of the others those
that can leave soonest, just enough of them. Until it has its pages, no further sequence of a victim is
admitted, unless it ends by when the victim can leave anyway, and no other adapter is placed; everyone else
goes on. The scheduler lets the victims' sequences yield once they have had their turn
(`engine.scheduler.turns`).

The bound: a claimed adapter has its pages once the victims' running sequences have had a turn or have
ended, and then keeps them until its first sequence runs. One claim stands at a time; the order of
admission, which is fair, decides whose is next. It need not wait for the copy of the one before to land:
whatever was placed for a sequence that waits is kept for it until then.

What is brought ahead of need makes no claim: it takes room that nobody uses. That holds for a `prefetch`,
for what is `expect`ed, and for pinned adapters, which stay once they are here; those that no memory has room
for are tried now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future

from engine.adapter_status import AdapterMemory, AdapterStatus, Residency
from engine.adapter_tiers import AdapterTiers
from engine.host_copy import HostCopy
from engine.load_outcomes import LoadFailed
from engine.rank_pages import RankPages
from engine.scheduler.ahead import Ahead
from engine.scheduler.claims import Claim, make_claim
from engine.scheduler.load_bills import LoadBills
from engine.scheduler.placements import PLACEMENTS_PER_STEP, DropAdapter, Placements, WriteAdapter
from engine.scheduler.residents import memory, residency, status
from engine.scheduler.turns import Leaving
from engine.step import StepAdapter


class AdapterGate:
    """Brings adapters to the device and says whether a sequence's adapter is there.

    Args:
        pages: owned by the gate from here on; nobody else places, acquires or evicts.
        tiers: where adapters come from.
        write, drop: see `Placements`.
        placements_per_step: of `PLACEMENTS_PER_STEP`, the device's.
    """

    def __init__(
        self,
        pages: RankPages,
        tiers: AdapterTiers,
        write: WriteAdapter,
        drop: DropAdapter = lambda pages: None,
        *,
        placements_per_step: int = PLACEMENTS_PER_STEP["cpu"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pages = pages
        self._tiers = tiers
        self._counters = tiers.counters
        self._placements = Placements(pages, write, drop, tiers.counters, per_step=placements_per_step)
        self._claim: Claim | None = None
        self._step = 0
        self._kept: set[bytes] = set()  # placed, and waited for: a reference keeps each until one runs
        self._failures: list[LoadFailed] = []
        self._ahead = Ahead(clock)
        self._bills = LoadBills()
        self._unloading: set[bytes] = set()

    # ---- what sequences need ------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way; its end may let a sequence start."""
        return self._tiers.is_loading

    @property
    def next_look(self) -> float | None:
        """When `begin_step` may have news of a load that hangs, by the monotonic clock."""
        return self._tiers.next_look

    @property
    def claim(self) -> tuple[bytes, frozenset[bytes]] | None:
        """An adapter that waits for pages, and whose it is to get; None when none does."""
        claim = self._claim
        return None if claim is None else (claim.digest, claim.victims)

    def begin_step(self, num_waiting: Callable[[bytes], int], *, idle: bool) -> None:
        """Takes in the loads that have ended, and gives the claimant its pages if they are there.

        Args:
            num_waiting: how many sequences wait for an adapter now.
            idle: no sequence runs, so copies to the device delay nobody.
        """
        self._step += 1
        self._placements.begin_step(idle=idle)
        for outcome in self._tiers.poll(num_waiting):
            if isinstance(outcome, LoadFailed):
                self._fail(outcome)
            else:
                self._bills.read(outcome.digest, outcome.copy.num_pages)
        for digest in self._tiers.take_crowded_out():
            if self._pages.resident(digest) is None:
                self._ahead.has_no_room(digest)
        self._advance_claim(num_waiting)
        self._bring_ahead(num_waiting)
        self._drop_loads_nobody_wants(num_waiting)
        for digest in [digest for digest in self._unloading if not num_waiting(digest)]:
            self._forget_if_unused(digest)
        self._bills.keep(lambda digest: num_waiting(digest) or self._tiers.is_loading_one(digest))

    def take_room(self, num_waiting: Callable[[bytes], int], *, idle: bool) -> None:
        """Gives the claimant its pages after sequences have yielded. Arguments as of `begin_step`."""
        self._placements.note_idle(idle)
        self._advance_claim(num_waiting)

    def take_bills(self) -> list[tuple[str, float]]:
        """What loads have cost tenants since the last call, in tokens of input."""
        return self._bills.take()

    def take_failures(self) -> list[LoadFailed]:
        """Adapters that could not be brought since the last call; their waiting sequences must end."""
        taken, self._failures = self._failures, []
        return taken

    def want(self, digest: bytes, tenant: str) -> None:
        """Says that a sequence for this adapter has come, so that its load starts now if there is room.

        The tenant is charged for the load, unless it is under way for another's.
        """
        if not digest:
            return
        self._unloading.discard(digest)
        self._ahead.has_come(digest)
        on_device = self._pages.resident(digest) is not None
        self._counters.note_request(digest, on_device=on_device, in_host=self._tiers.has(digest))
        if not on_device:
            self._tiers.want(digest, tenant)
            if self._tiers.is_loading_one(digest):
                self._bills.begin(digest, tenant)

    def is_open(
        self,
        digest: bytes,
        tenant: str,
        leaving: Callable[[], Mapping[bytes, Leaving]],
        *,
        num_steps: int,
        goes_first: bool = False,
        may_claim: bool = True,
    ) -> bool:
        """Whether a sequence of this adapter may start now. If not, sees to it that one will.

        Args:
            tenant: whose sequence it is; it is charged for what it takes to bring the adapter.
            leaving: gives, by adapter, how its running sequences can leave it.
            num_steps: how many it takes until the sequence ends, if it starts now.
            goes_first: a claim that stands for another adapter gives way, if this one is here to be placed;
                the other's sequence claims anew when it is asked for next.
            may_claim: whether others' adapters may have to leave for this one.
        """
        if not digest:
            return True
        claim = self._claim
        if goes_first and claim is not None and claim.digest != digest and self._is_here(digest):
            self._claim = claim = None
        if not self.lets_start(digest, num_steps=num_steps):
            return False
        if self._pages.resident(digest) is None:
            self._bills.begin(digest, tenant)
        if self._bring(digest, tenant):
            if self._placements.is_usable(digest):
                return True
            is_victim = claim is not None and digest in claim.victims
            if not is_victim and not self._pages.references(digest):
                self._keep(digest)
            return False
        copy = self._tiers.want(digest, tenant)
        may_claim = may_claim and (claim is None or (claim.digest == digest and not claim.suffices))
        if copy is not None and may_claim and self._placements.may_place:
            self._claim = make_claim(self._pages, digest, copy, leaving(), step=self._step, before=claim)
        return False

    def lets_start(self, digest: bytes, *, num_steps: int) -> bool:
        """Whether no claim keeps a sequence of this adapter from starting. Arguments as of `is_open`."""
        claim = self._claim
        return claim is None or claim.lets_start(digest, end=self._step + num_steps)

    def _is_here(self, digest: bytes) -> bool:
        return self._pages.resident(digest) is not None or self._tiers.has(digest)

    def here(self) -> Set[bytes]:
        """The adapters on the device: a view that changes along."""
        return self._pages.digests()

    def staying(self) -> Set[bytes]:
        """Those on the device that do not make room for another."""
        return self.here() if self._claim is None else self.here() - self._claim.victims

    def vocab_size(self, digest: bytes) -> int:
        """The tokens that an adapter on the device can read and draw; 0: those of the base model."""
        adapter = self._pages.resident(digest)
        return adapter.vocab_size if adapter else 0

    def acquire(self, digest: bytes) -> StepAdapter | None:
        """One more running sequence uses an adapter that `is_open`; None for the base model."""
        if not digest:
            return None
        adapter = self._pages.acquire(digest)
        self._keep_no_more(digest)
        if self._claim is not None and self._claim.digest == digest:
            self._claim = None  # it got its pages after `take_room`, say by a preemption
        return adapter

    def release(self, digest: bytes) -> None:
        """A sequence that acquired the adapter runs no more."""
        if digest:
            self._pages.release(digest)

    def give_up_claim(self) -> None:
        """Ends the claim that stands; its adapter's sequences claim anew when they are asked for."""
        self._claim = None

    def note_yield(self) -> None:
        """The scheduler has let the sequences of an adapter yield."""
        self._counters.yields += 1

    def begin_load(self, digest: bytes) -> None:
        """Begins to read an adapter for which a request, or its announcement, has come; from any thread."""
        if digest and self._pages.resident(digest) is None:
            self._tiers.begin(digest)

    # ---- what comes ahead of need, and goes ---------------------------------------------------------

    def expect(self, digest: bytes) -> None:
        """Says that a request for this adapter is on its way, so that it is in host memory by then."""
        if self._pages.resident(digest) is None and not self._tiers.has(digest):
            self._ahead.expect(digest)

    def prefetch(self, digest: bytes, answer: Future[str]) -> None:
        """Brings an adapter to the device when there is room; the answer is "" then, or the fault.

        Cancelling the answer ends it, and drops the load if it has not begun.
        """
        self._unloading.discard(digest)
        self._ahead.prefetch(digest, answer)

    def pin(self, digests: frozenset[bytes]) -> None:
        """Says which adapters are to be brought when there is room, and to stay: these, and no others."""
        self._ahead.pin(digests)
        self._tiers.pin(digests - self._pages.pinned())
        for digest in self._pages.pinned() - digests:
            self._pages.unpin(digest)

    def unload(self, digest: bytes) -> None:
        """Forgets an adapter, on the local disk too, once no sequence runs or waits with it.

        A new sequence keeps it after all. If it is pinned, it was: until `pin` says so again.
        """
        self._ahead.forget(digest)
        self._pages.unpin(digest)
        self._unloading.add(digest)

    # ---- what others ask ----------------------------------------------------------------------------

    def residency(self) -> dict[bytes, Residency]:
        """The fastest tier of each adapter in host or device memory."""
        return residency(self._pages, self._tiers)

    def status(self, digest: bytes) -> AdapterStatus:
        """One adapter, wherever it is; what is not in memory is said to be nowhere."""
        return status(self._pages, self._tiers, digest)

    def statuses(self) -> list[AdapterStatus]:
        """Every adapter in host or device memory."""
        return [self.status(digest) for digest in self.residency()]

    def memory(self) -> AdapterMemory:
        """How full the tiers are, and what has happened in them."""
        return memory(self._pages, self._tiers)

    def check(self, users: list[bytes]) -> None:
        """Asserts the invariants of pages and tiers. ``users``: the adapter of each sequence that has one."""
        claim = self._claim
        assert not self._kept & {*users}, "kept for a sequence that runs already"
        assert claim is None or claim.digest not in users, "claimed for a sequence that runs already"
        assert claim is None or not self._kept & claim.victims, "kept, and to make room"
        self._pages.check([*users, *self._kept])
        self._tiers.check()

    # ---- placing ------------------------------------------------------------------------------------

    def _bring(self, digest: bytes, tenant: str = "") -> bool:
        """Puts an adapter on the device if it is not there and nothing stands in the way."""
        if self._pages.resident(digest) is not None:
            return True
        claim = self._claim
        copy = (
            claim.copy if claim is not None and claim.digest == digest else self._tiers.want(digest, tenant)
        )
        if copy is None or not self._placements.may_place:
            return False
        if claim is not None and claim.digest != digest:
            return False
        return self._placements.make_room(copy) and self._place(digest, copy)

    def _place(self, digest: bytes, copy: HostCopy) -> bool:
        fault = self._placements.place(digest, copy)
        if fault:
            self._tiers.discard(digest)
            self._fail(LoadFailed(digest, fault))
            return False
        self._bills.copied(digest, copy.num_pages)
        if digest in self._ahead.pinned:
            self._pages.pin(digest)
        return True

    def _bring_ahead(self, num_waiting: Callable[[bytes], int]) -> None:
        """Answers prefetches, and goes on with them and what is pinned or expected; see `_may_load`."""
        for digest in self._ahead.prefetched():
            hanging = self._tiers.hanging(digest)
            if hanging is not None:
                self._ahead.answer(digest, hanging.reason)
            elif self._may_load(digest, num_waiting) and self._bring(digest):
                self._ahead.answer(digest, "")
        for digest in self._ahead.to_pin(self._pages.pinned()):
            resident = self._pages.resident(digest)
            if resident is not None:
                self._pages.pin(digest)
            elif self._may_load(digest, num_waiting):
                copy = self._tiers.want(digest)
                if copy is not None and self._pages.can_pin(copy.num_pages):
                    self._bring(digest)
        for digest in self._ahead.expected():
            if self._may_load(digest, num_waiting):
                self._tiers.want(digest)
        if self._ahead.pinned:
            self._tiers.pin(self._ahead.pinned - self._pages.pinned())

    def _may_load(self, digest: bytes, num_waiting: Callable[[bytes], int]) -> bool:
        """Whether an adapter that nobody waits for may be read, if it has to be."""
        is_known = self._tiers.has(digest) or self._tiers.is_loading_one(digest)
        return is_known or self._tiers.lets_ahead(num_waiting)

    def _drop_loads_nobody_wants(self, num_waiting: Callable[[bytes], int]) -> None:
        for digest in self._tiers.loading():
            if not num_waiting(digest) and not self._ahead.wants(digest):
                self._tiers.cancel(digest)

    # ---- claims -------------------------------------------------------------------------------------

    def _advance_claim(self, num_waiting: Callable[[bytes], int]) -> None:
        for digest in [digest for digest in self._kept if not num_waiting(digest)]:
            self._keep_no_more(digest)
        claim = self._claim
        if claim is None:
            return
        if not num_waiting(claim.digest):
            self._claim = None
        elif self._bring(claim.digest):
            self._keep(claim.digest)
            self._claim = None

    def _keep(self, digest: bytes) -> None:
        """Lets nobody else have the pages until the first sequence that waits for them runs.

        What is kept has no running sequence and is no claim's victim, or neither of the two could have pages.
        """
        if digest not in self._kept:
            self._pages.acquire(digest)
            self._kept.add(digest)

    def _keep_no_more(self, digest: bytes) -> None:
        if digest in self._kept:
            self._kept.discard(digest)
            self._pages.release(digest)

    def _fail(self, failure: LoadFailed) -> None:
        if self._claim is not None and self._claim.digest == failure.digest:
            self._claim = None
        self._bills.drop(failure.digest)
        self._failures.append(failure)
        self._ahead.answer(failure.digest, failure.reason)

    def _forget_if_unused(self, digest: bytes) -> None:
        if self._pages.references(digest) or self._tiers.is_loading_one(digest):
            return
        self._unloading.discard(digest)
        if self._pages.resident(digest) is not None:
            self._placements.evict(digest)
        self._tiers.forget(digest)
