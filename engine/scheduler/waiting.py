"""The sequences that wait to be admitted, and the order in which they may be."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Set

from engine.scheduler.fairness import Account, Rank, VirtualTokenCounters
from engine.sequence import Sequence, Status

MOST_AWAY = 64
"""So many sequences are proposed whose adapter is not on the device: more than adapters load at once."""
LEAST_AWAY = 4
"""So many of a tenant in any case: what others wait for may never come."""

_Proposal = tuple[tuple[int, int, int], Sequence]
"""A sequence behind its order, which is its own alone: no two sequences are ever compared."""


def _order(seq: Sequence) -> tuple[int, int, int]:
    return seq.order


class WaitingQueue:
    """Waiting sequences in lanes: one for each tenant and adapter, each in the tenant's own order.

    Lanes let a sequence whose adapter is not here step aside together with those behind it that want the
    same one, while the tenant's others are looked at. A tenant's order is: preempted, then priority, then
    arrival.

    With thousands of adapters queued a step must not ask about each. So only the first `MOST_AWAY` lanes in
    order are looked at, the first `LEAST_AWAY` of each tenant, and all whose adapter is on the device, of
    which there are no more than rank pages.
    """

    def __init__(self, counters: VirtualTokenCounters) -> None:
        self._counters = counters
        self._lanes: dict[str, dict[bytes, list[Sequence]]] = {}
        self._heads: dict[str, list[_Proposal]] = {}  # the first of each of a tenant's lanes, in order
        self._by_adapter: Counter[bytes] = Counter()
        self._length = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no particular order."""
        return (seq for lanes in self._lanes.values() for lane in lanes.values() for seq in lane)

    def count(self, adapter_digest: bytes) -> int:
        """How many wait for this adapter."""
        return self._by_adapter[adapter_digest]

    def least_served(self, adapter_digest: bytes) -> str | None:
        """The tenant whose turn is next of those with a sequence that waits for this adapter."""
        accounts = [
            account for account in self._counters.waiting() if adapter_digest in self._lanes[account.tenant]
        ]
        return min(accounts, key=lambda account: account.rank).tenant if accounts else None

    def num_tokens_of(self, count: int) -> int:
        """About how many tokens came with so many of them, reckoned by the mean of all."""
        return self._num_tokens * min(count, self._length) // max(1, self._length)

    def num_ready(self, adapters: Set[bytes]) -> int:
        """How many wait for one of these adapters, or for the base model."""
        few, many = sorted((self._by_adapter.keys(), adapters), key=len)
        return self._by_adapter[b""] + sum(self._by_adapter[digest] for digest in few if digest in many)

    def ready_of(self, tenant: str, adapters: Set[bytes]) -> Iterator[Sequence]:
        """A waiting tenant's sequences that wait for one of these adapters, or for the base model."""
        lanes = self._lanes[tenant]
        return (seq for digest in lanes.keys() & {b"", *adapters} for seq in lanes[digest])

    def of_adapter(self, adapter_digest: bytes) -> list[Sequence]:
        """Those that wait for this adapter, in no particular order."""
        return [seq for lanes in self._lanes.values() for seq in lanes.get(adapter_digest, ())]

    def push(self, seq: Sequence) -> None:
        """Adds a sequence, and lifts its tenant's counter if nothing of it was waiting."""
        request = seq.request
        self._counters.arrive(request.tenant, request.weight)
        lane = self._lanes.setdefault(request.tenant, {}).setdefault(request.adapter_digest, [])
        insort(lane, seq, key=_order)
        if lane[0] is seq:
            heads = self._heads.setdefault(request.tenant, [])
            if len(lane) > 1:
                _take_out(heads, lane[1])
            insort(heads, (seq.order, seq))
        self._by_adapter[request.adapter_digest] += 1
        self._length += 1
        self._num_tokens += seq.num_given

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        request = seq.request
        lanes, heads = self._lanes[request.tenant], self._heads[request.tenant]
        lane = lanes[request.adapter_digest]
        index = bisect_left(lane, seq.order, key=_order)
        assert lane[index] is seq
        del lane[index]
        if index == 0:
            _take_out(heads, seq)
            if lane:
                insort(heads, (lane[0].order, lane[0]))
        if not lane:
            del lanes[request.adapter_digest]
            if not lanes:
                del self._lanes[request.tenant], self._heads[request.tenant]
        self._by_adapter[request.adapter_digest] -= 1
        if not self._by_adapter[request.adapter_digest]:
            del self._by_adapter[request.adapter_digest]
        self._length -= 1
        self._num_tokens -= seq.num_given
        self._counters.depart(request.tenant)

    def fair_order(self, here: Set[bytes]) -> Iterator[Sequence]:
        """Proposes sequences one by one: the next of the tenant that was served least (`Account.rank`).

        The caller either takes a proposal (`remove`, a new status, and a charge, before it asks for the
        next) or leaves it, and then its lane is left out for the rest of this iteration.

        Args:
            here: the adapters on the device. Of others `MOST_AWAY` are proposed, and `LEAST_AWAY` of each
                tenant.
        """
        heap: list[tuple[Rank, int, Account]] = [
            (account.rank, number, account) for number, account in enumerate(self._counters.waiting())
        ]
        heapq.heapify(heap)
        proposals: dict[str, list[_Proposal]] = {}
        num_away, num_away_of = 0, Counter[str]()
        while heap:
            _, number, account = heapq.heappop(heap)
            if account.tenant not in proposals:
                proposals[account.tenant] = self._proposals(account.tenant, here)
            heads = proposals[account.tenant]
            while heads:
                _, head = heapq.heappop(heads)
                if head.request.adapter_digest and head.request.adapter_digest not in here:
                    if num_away >= MOST_AWAY and num_away_of[account.tenant] >= LEAST_AWAY:
                        continue
                    num_away += 1
                    num_away_of[account.tenant] += 1
                yield head
                if head.status is not Status.WAITING:
                    lane = self._lanes.get(account.tenant, {}).get(head.request.adapter_digest)
                    if lane:
                        heapq.heappush(heads, (lane[0].order, lane[0]))
                    heapq.heappush(heap, (account.rank, number, account))
                    break

    def _proposals(self, tenant: str, here: Set[bytes]) -> list[_Proposal]:
        """The first of those of the tenant's lanes that are looked at, as a heap."""
        lanes, heads = self._lanes[tenant], self._heads[tenant]
        proposals = heads[:MOST_AWAY]
        if len(heads) > MOST_AWAY:
            last, _ = proposals[-1]
            firsts = [lanes[digest][0] for digest in (b"", *here) if digest in lanes]
            proposals += [(seq.order, seq) for seq in firsts if seq.order > last]
        heapq.heapify(proposals)
        return proposals


def _take_out(heads: list[_Proposal], seq: Sequence) -> None:
    index = bisect_left(heads, (seq.order,))
    assert heads[index][1] is seq
    del heads[index]
