"""The sequences that wait to be admitted, and the order in which they may be."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from engine.scheduler.fairness import Account, VirtualTokenCounters
from engine.sequence import Sequence, Status

_Proposal = tuple[tuple[int, int, int], Sequence]
"""A sequence behind its order, which is its own alone: no two sequences are ever compared."""


def _order(seq: Sequence) -> tuple[int, int, int]:
    return seq.order


class WaitingQueue:
    """Waiting sequences in lanes: one for each tenant and adapter, each in the tenant's own order.

    Lanes let a sequence whose adapter is not here step aside together with those behind it that want the
    same one, while the tenant's others are looked at. A tenant's order is: preempted, then priority, then
    arrival.
    """

    def __init__(self, counters: VirtualTokenCounters) -> None:
        self._counters = counters
        self._lanes: dict[str, dict[bytes, list[Sequence]]] = {}
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

    def push(self, seq: Sequence) -> None:
        """Adds a sequence, and lifts its tenant's counter if nothing of it was waiting."""
        request = seq.request
        self._counters.arrive(request.tenant, request.weight)
        lanes = self._lanes.setdefault(request.tenant, {})
        insort(lanes.setdefault(request.adapter_digest, []), seq, key=_order)
        self._by_adapter[request.adapter_digest] += 1
        self._length += 1
        self._num_tokens += seq.num_given

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        request = seq.request
        lanes = self._lanes[request.tenant]
        lane = lanes[request.adapter_digest]
        index = bisect_left(lane, seq.order, key=_order)
        assert lane[index] is seq
        del lane[index]
        if not lane:
            del lanes[request.adapter_digest]
            if not lanes:
                del self._lanes[request.tenant]
        self._by_adapter[request.adapter_digest] -= 1
        if not self._by_adapter[request.adapter_digest]:
            del self._by_adapter[request.adapter_digest]
        self._length -= 1
        self._num_tokens -= seq.num_given
        self._counters.depart(request.tenant)

    def fair_order(self) -> Iterator[Sequence]:
        """Proposes sequences one by one: the next of the tenant that was served least (`Account.rank`).

        The caller either takes a proposal (`remove`, a new status, and a charge, before it asks for the
        next) or leaves it, and then its lane is left out for the rest of this iteration.
        """
        heap: list[tuple[tuple[float, int], int, Account]] = [
            (account.rank, number, account) for number, account in enumerate(self._counters.waiting())
        ]
        heapq.heapify(heap)
        proposals: dict[str, list[_Proposal]] = {}
        while heap:
            _, number, account = heapq.heappop(heap)
            if account.tenant not in proposals:
                proposals[account.tenant] = self._heads(account.tenant)
            heads = proposals[account.tenant]
            while heads:
                _, head = heapq.heappop(heads)
                yield head
                if head.status is not Status.WAITING:
                    lane = self._lanes.get(account.tenant, {}).get(head.request.adapter_digest)
                    if lane:
                        heapq.heappush(heads, (lane[0].order, lane[0]))
                    heapq.heappush(heap, (account.rank, number, account))
                    break

    def _heads(self, tenant: str) -> list[_Proposal]:
        """The first of each of the tenant's lanes, as a heap."""
        heads = [(lane[0].order, lane[0]) for lane in self._lanes[tenant].values()]
        heapq.heapify(heads)
        return heads
