"""Turns: when a running sequence has had enough of what others wait for, to let them have it.

With more adapters in use than there is room for, some of them wait. If they waited until a running sequence
ends, a long answer would keep them from their first token for minutes. So adapters take turns, as processes
do on a processor: a sequence that has had its turn yields when another adapter claims its pages. Its blocks
usually stay in the prefix cache, so that coming back costs no more than the tokens of one block. A turn is
long enough to be worth that, and longer for long contexts, which cost more when they have been displaced.
Without a prefix cache all of the context is computed again, and few answers are long enough for a second
turn. The same is reckoned with when those who have yielded have filled half of the blocks that are idle, but
not against a tenant of which nothing runs.

Between tenants, those yield who were served no less than the tenant that claims: so a flood of one tenant's
adapters does not take turns away from others. And a tenant of which nothing runs need not wait for a turn of
one that goes on with other sequences: it gets pages, a seat and blocks at once. That is cheap, since it
happens at most once for each of its requests, and these are charged for the adapters they bring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.scheduler.fairness import Account, VirtualTokenCounters
from engine.sequence import Sequence

LEAST_TURN = 32
"""Tokens that a sequence generates before it yields: many times what it costs to swap an adapter."""
TOKENS_PER_CACHED = 1 / 16
"""How many it also generates for each token of its context that is probably cached."""
TOKENS_PER_RECOMPUTED = 4
"""How many for each that would be computed again."""
YIELD_STEPS = LEAST_TURN // 2
"""A claim waits for so many steps more rather than have somebody yield: coming back costs about that."""


def left_of_turn(seq: Sequence, *, is_cached: bool) -> int:
    """Tokens that a running sequence will generate before it yields; negative when its turn is over."""
    share = TOKENS_PER_CACHED if is_cached else TOKENS_PER_RECOMPUTED
    turn = max(LEAST_TURN, int(seq.num_computed * share))
    return turn - (len(seq.tokens) + seq.num_unseen - seq.num_at_start)


@dataclass(frozen=True, slots=True)
class Leaving:
    """After how many steps an adapter's running sequences can have left it, given a row in each; not above 0:
    now. ``yields``: one of them would have to yield for that, who is not background work.
    """

    steps: int
    yields: bool

    @property
    def rank(self) -> int:
        """Which of several is the best to take: to spare a yield is worth some steps."""
        return max(0, self.steps) + YIELD_STEPS if self.yields else self.steps


class Turns:
    """Says which running sequences yield, and when. Changes nothing.

    Args:
        running: the sequences that run now, in the order of their admission; the scheduler's own list.
        is_cached: whether there is a prefix cache, where what a sequence has computed stays when it yields.
        is_crowded: whether so much of the cache is that of others who have yielded that it may not.
    """

    def __init__(
        self,
        running: Seq[Sequence],
        counters: VirtualTokenCounters,
        *,
        is_cached: bool,
        is_crowded: Callable[[], bool],
    ) -> None:
        self._running = running
        self._counters = counters
        self._is_cached = is_cached
        self._is_crowded = is_crowded

    def leaving(self, claimant: str) -> dict[bytes, Leaving]:
        """By adapter, how its running sequences can leave it to a tenant: by yielding, or at their end."""
        leaving: dict[bytes, Leaving] = {}
        claiming = self._counters.account(claimant)
        is_cached = self._is_cached and not (claiming.num_running and self._is_crowded())
        users = Counter((seq.request.adapter_digest, seq.request.tenant) for seq in self._running)
        for seq in self._running:
            digest, tenant = seq.request.adapter_digest, seq.request.tenant
            if not digest:
                continue
            at_end = left = seq.request.max_len - seq.num_computed
            account = self._counters.account(tenant)
            if account.yields_to(claiming):
                left = 0
            elif account.owes(claiming):
                left = min(left, left_of_turn(seq, is_cached=is_cached))
                if claiming.num_running == 0 and account.num_running > users[digest, tenant]:
                    left = min(left, 0)
            own = Leaving(left, yields=left < at_end and not account.yields_to(claiming))
            last = leaving.get(digest, own)
            leaving[digest] = Leaving(max(last.steps, own.steps), last.yields or own.yields)
        return leaving

    def who_yields(self, newcomer: str, seats: int, blocks: int) -> list[Sequence]:
        """The sequences that make room for a tenant of which nothing runs; none if they would not suffice.

        Of the tenants that were served no less, the one served most gives first, and of its sequences those
        admitted last. Its only one goes on until its turn is over. All beams of a search are one.

        Args:
            seats, blocks: how many are lacking.
        """
        claiming = self._counters.account(newcomer)
        yielding: list[Sequence] = []
        units = [seq for seq in self._running if seq.leads]
        left = Counter(seq.request.tenant for seq in units)
        for seq in sorted(reversed(units), key=lambda seq: self._account(seq).rank[:2], reverse=True):
            if seats <= 0 and blocks <= 0:
                return yielding
            tenant = seq.request.tenant
            is_over = left[tenant] > 1 or left_of_turn(seq, is_cached=self._is_cached) <= 0
            if self._account(seq).owes(claiming) and is_over and not seq.is_ending:
                yielding.append(seq)
                left[tenant] -= 1
                seats -= seq.num_seats
                blocks -= seq.num_blocks
        return yielding if seats <= 0 and blocks <= 0 else []

    def _account(self, seq: Sequence) -> Account:
        return self._counters.account(seq.request.tenant)
