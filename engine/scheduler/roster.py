"""Who is here: every sequence that has not ended, by id, by request and by deadline."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass

from engine.scheduler.background import is_background
from engine.sequence import Request, Sequence

Key = tuple[Hashable, int]
"""A link and a request id."""

_FEW_DEADLINES = 64


@dataclass(slots=True)
class _Entry:
    request: Request
    sequences: list[Sequence]
    started: bool = False


class Roster:
    """The sequences of all requests that have not ended. Holds no resources; the scheduler does."""

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self._entries: dict[Key, _Entry] = {}
        self._deadlines: list[tuple[float, int, Key]] = []
        self._num_of_tenant: Counter[str] = Counter()
        self.num_background = 0
        """Sequences of background work."""
        self._next_seq_id = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def get(self, seq_id: int) -> Sequence | None:
        """A sequence, unless it has ended."""
        return self._by_id.get(seq_id)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def has_others_than_background(self) -> bool:
        """Whether there is anybody whom background work must not delay."""
        return len(self) > self.num_background

    def num_of_tenant(self, tenant: str) -> int:
        """How many sequences of the tenant have not ended."""
        return self._num_of_tenant[tenant]

    def tenants(self) -> Collection[str]:
        """The tenants with a sequence that has not ended."""
        return self._num_of_tenant.keys()

    def enlist(self, request: Request) -> list[Sequence]:
        """Makes the sequences of a request, one for each choice, with ids never used before."""
        assert request.key not in self._entries, "a request id is used twice"
        sequences: list[Sequence] = []
        for choice in range(len(request.sampling)):
            seq = Sequence(request, choice, self._next_seq_id)
            self._next_seq_id += 1
            self._by_id[seq.seq_id] = seq
            sequences.append(seq)
        self._entries[request.key] = _Entry(request, list(sequences))
        self._num_of_tenant[request.tenant] += len(sequences)
        self.num_background += len(sequences) * is_background(request.tenant)
        if request.deadline is not None:
            self._forget_ended()
            heapq.heappush(self._deadlines, (request.deadline, sequences[0].seq_id, request.key))
        return sequences

    def _forget_ended(self) -> None:
        """Drops the deadlines of requests that have ended, once they are the most: most requests end in
        seconds, and some have a day. Amortised over arrivals.
        """
        if len(self._deadlines) > 2 * len(self._entries) + _FEW_DEADLINES:
            self._deadlines = [each for each in self._deadlines if self._open_entry(*each) is not None]
            heapq.heapify(self._deadlines)

    def _open_entry(self, deadline: float, _: int, key: Key) -> _Entry | None:
        """The request that a deadline is for, unless it has ended."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.request.deadline == deadline else None

    def strike(self, seq: Sequence) -> None:
        """Takes out a sequence that has ended; its request is gone with its last one."""
        del self._by_id[seq.seq_id]
        tenant = seq.request.tenant
        self._num_of_tenant[tenant] -= 1
        self.num_background -= is_background(tenant)
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant]
        entry = self._entries[seq.request.key]
        entry.sequences.remove(seq)
        if not entry.sequences:
            del self._entries[seq.request.key]

    def take_ticket(self) -> int:
        """A number greater than all ids of sequences until now, and less than all that come."""
        ticket, self._next_seq_id = self._next_seq_id, self._next_seq_id + 1
        return ticket

    def mark_started(self, request: Request) -> bool:
        """Returns whether this is the first time for the request."""
        entry = self._entries[request.key]
        first, entry.started = not entry.started, True
        return first

    def of_request(self, link: Hashable, request_id: int) -> list[Sequence]:
        """The sequences of a request that have not ended; none if it is not known."""
        entry = self._entries.get((link, request_id))
        return list(entry.sequences) if entry else []

    def of_link(self, link: Hashable) -> list[Sequence]:
        return [seq for key, entry in self._entries.items() if key[0] == link for seq in entry.sequences]

    def take_overdue(self, now: float) -> list[Sequence]:
        """The sequences whose deadline has passed; their requests are not reported again."""
        overdue: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = self._open_entry(*heapq.heappop(self._deadlines))
            if entry is not None:
                overdue += entry.sequences
        return overdue
