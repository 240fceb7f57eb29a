"""Before a step is planned: who gives up pages, seats and blocks, and for whom."""

from __future__ import annotations

from functools import partial

from engine.block_pool import BlockPool
from engine.scheduler.adapter_gate import AdapterGate
from engine.scheduler.background import is_background, who_gives_way
from engine.scheduler.lives import Lives
from engine.scheduler.turns import Turns
from engine.sequence import Sequence


class Room:
    """Makes room for those that are next and lack some.

    Args:
        max_num_seqs: the seats.

    Attributes:
        num_awaiting: steps since there has been a tenant next of which nothing runs.
    """

    def __init__(self, max_num_seqs: int, lives: Lives, pool: BlockPool, gate: AdapterGate) -> None:
        self.num_awaiting = 0
        self._max_num_seqs = max_num_seqs
        self._lives = lives
        self._pool = pool
        self._gate = gate
        self._running = lives.running
        self._waiting = lives.waiting
        self._roster = lives.roster
        self._counters = lives.counters
        self._turns = Turns(
            lives.running,
            lives.counters,
            is_cached=pool.has_prefix_cache,
            is_crowded=lambda: 2 * lives.num_yielded_blocks > pool.num_idle,
        )

    def make(self) -> None:
        """Lets sequences whose turn is over yield what others wait for: pages, seats, and blocks."""
        self._end_background_claim()
        for seq in self._who_gives_way():
            self._lives.yield_room(seq)
        newcomer = self._newcomer()
        self.num_awaiting = 0 if newcomer is None else self.num_awaiting + 1
        if self._yield_pages():
            self._gate.take_room(self._waiting.count, idle=not self._running)
        if newcomer is not None and self.is_open(newcomer):
            self._yield_room(newcomer)

    def _newcomer(self) -> Sequence | None:
        """The next sequence of the tenant that is next, if nothing of that tenant runs.

        The first whose adapter is here, else the first; those without have told the gate what they lack.
        """
        first = None
        for seq in self._waiting.fair_order(self._gate.here()):
            tenant = seq.request.tenant
            if is_background(tenant) or self._counters.num_running(tenant):
                break
            if first and tenant != first.request.tenant:
                break
            first = first or seq
            if self.is_open(seq, goes_first=self._is_claimed_by_others(tenant)):
                return seq
        return first

    def _who_gives_way(self) -> list[Sequence]:
        if not self._roster.num_background:
            return []
        here = self._gate.here()
        tenants = [account.tenant for account in self._counters.waiting() if not account.is_background]
        ready = (seq for tenant in tenants for seq in self._waiting.ready_of(tenant, here))
        return who_gives_way(
            self._running,
            filter(self._may_start, ready),
            free_seats=self._max_num_seqs - self._lives.num_seats,
            free_blocks=self._pool.num_idle - self._lives.tables.headroom(len(self._running)),
            most=self._max_num_seqs,
        )

    def _may_start(self, seq: Sequence) -> bool:
        """Whether no claim keeps one whose adapter is here from starting."""
        num_steps = seq.request.max_len - len(seq.tokens)
        return self._gate.lets_start(seq.request.adapter_digest, num_steps=num_steps)

    def _end_background_claim(self) -> None:
        """A claim of background work keeps adapters from starting sequences; not those of anybody else."""
        claim = self._gate.claim
        if claim is None or not self._roster.has_others_than_background:
            return
        claimant = self._waiting.least_served(claim[0])
        if claimant is None or is_background(claimant):
            self._gate.give_up_claim()

    def _is_claimed_by_others(self, tenant: str) -> bool:
        """Whether a claim stands for a tenant that goes on with other sequences meanwhile."""
        claim = self._gate.claim
        claimant = tenant if claim is None else self._waiting.least_served(claim[0])
        return claimant is not None and claimant != tenant and self._counters.num_running(claimant) > 0

    def is_open(self, seq: Sequence, *, goes_first: bool = False) -> bool:
        """See `AdapterGate.is_open`."""
        tenant = seq.request.tenant
        leaving = partial(self._turns.leaving, tenant)
        num_steps = seq.request.max_len - len(seq.tokens)
        return self._gate.is_open(
            seq.request.adapter_digest,
            tenant,
            leaving,
            num_steps=num_steps,
            goes_first=goes_first,
            may_claim=not (is_background(tenant) and self._roster.has_others_than_background),
        )

    def _yield_pages(self) -> bool:
        """Lets sequences make room for the adapter that claims their pages. Returns whether any has."""
        claim = self._gate.claim
        if claim is None:
            return False
        digest, victims = claim
        claimant = self._waiting.least_served(digest)
        if claimant is None:
            return False
        leaving = self._turns.leaving(claimant)
        ready = sorted(victim for victim in victims if victim in leaving and leaving[victim].steps <= 0)
        for victim in ready:
            self._gate.note_yield()
            users = [seq for seq in self._running if seq.request.adapter_digest == victim and seq.leads]
            for seq in users:
                self._lives.yield_pages(seq, claimant)
        return bool(ready)

    def _yield_room(self, newcomer: Sequence) -> None:
        """Lets sequences make room for a tenant of which nothing runs, if that suffices for it."""
        seats = newcomer.num_seats + self._lives.num_seats - self._max_num_seqs
        blocks = self._lives.tables.lacking(newcomer, num_running=len(self._running))
        if seats > 0 or blocks > 0:
            for seq in self._turns.who_yields(newcomer.request.tenant, seats, blocks):
                self._lives.yield_room(seq)
