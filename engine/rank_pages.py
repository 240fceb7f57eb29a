"""The rank pages: which adapter owns each page of the device's adapter memory, and who is using it.

A page holds 16 rank rows of every adapted projection in every layer, so an adapter takes as many pages as
its rank needs, anywhere in the pool. An adapter with references is never moved or evicted; one without
stays until its pages are wanted. Which goes first is `engine.eviction`'s to say.

What a few adapters need outside the pages, for the embedding and ``lm_head``, is counted here too, in bytes
against a budget of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from engine.eviction import GreedyDual, reload_cost
from engine.host_copy import HostCopy
from engine.step import StepAdapter

PAGE_RANK = 16
"""Rank rows in a page; the kernels' layout is built on it."""

PINNED_SHARE = 0.5
"""Most of the pages that pinned adapters may hold for good: the others must be able to come and go."""


def pages_for_rank(rank: int) -> int:
    """How many pages an adapter of this rank takes, if it has nothing but ranks."""
    return -(-rank // PAGE_RANK)


class Room(NamedTuple):
    """An amount of device memory for adapters."""

    pages: int
    ends_bytes: int

    @property
    def is_enough(self) -> bool:
        """Whether nothing lacks, for an amount that says what does."""
        return self.pages <= 0 and self.ends_bytes <= 0


@dataclass(slots=True)
class _Resident:
    adapter: StepAdapter
    ends_bytes: int
    references: int = 0


class RankPages:
    """The only owner of the page ↔ digest map and of its reference counts (one per sequence).

    Not thread-safe: it lives on the loop's thread. It moves no weights; who places an adapter writes its
    pages before anyone acquires it.

    Args:
        ends_bytes: the budget of what adapters hold outside the pages.
        in_host: whether an adapter is in host memory too; what is not is dearer to bring back.
    """

    def __init__(
        self, num_pages: int, *, ends_bytes: int = 0, in_host: Callable[[bytes], bool] = lambda digest: True
    ) -> None:
        if num_pages < 0:
            raise ValueError(f"a pool cannot have {num_pages} pages")
        self.num_pages = num_pages
        self._ends_budget = ends_bytes
        self._ends_bytes = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._residents: dict[bytes, _Resident] = {}
        self._unreferenced: set[bytes] = set()
        self._pinned: set[bytes] = set()
        self._order = GreedyDual()
        self._in_host = in_host
        self._next_id = 1

    # ---- what is here -------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Pages that belong to nobody."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that are free, or could be: those of adapters that nobody references, pinned or not."""
        return len(self._free) + self._pages_of(self._unreferenced)

    @property
    def num_pinned(self) -> int:
        """Pages of pinned adapters."""
        return self._pages_of(self._pinned)

    def resident(self, digest: bytes) -> StepAdapter | None:
        """The pages of an adapter that is on the device. Valid until its last reference is released."""
        entry = self._residents.get(digest)
        return entry.adapter if entry else None

    def residents(self) -> Mapping[bytes, StepAdapter]:
        """A copy of what is on the device, by digest."""
        return {digest: entry.adapter for digest, entry in self._residents.items()}

    def digests(self) -> Set[bytes]:
        """What is on the device: a view that changes along."""
        return self._residents.keys()

    def references(self, digest: bytes) -> int:
        """How many sequences use the adapter now; 0 also when it is not on the device."""
        entry = self._residents.get(digest)
        return entry.references if entry else 0

    def room_of(self, digest: bytes) -> Room:
        """What an adapter on the device takes there."""
        entry = self._residents[digest]
        return Room(len(entry.adapter.pages), entry.ends_bytes)

    def lacking(self, copy: HostCopy) -> Room:
        """What would still lack for an adapter if all that may go for it went; see `Room.is_enough`."""
        going = [self.room_of(digest) for digest in self.evictable(copy)]
        return Room(
            copy.num_pages - len(self._free) - sum(room.pages for room in going),
            copy.ends_bytes + self._ends_bytes - self._ends_budget - sum(room.ends_bytes for room in going),
        )

    def evictable(self, copy: HostCopy) -> set[bytes]:
        """The adapters that nobody uses and that may go for this one.

        Pinned ones stay, unless it is so large that it could never come beside them.
        """
        return (
            self._unreferenced - self._pinned if self._fits_beside_pinned(copy) else set(self._unreferenced)
        )

    def may_go(self, digest: bytes, copy: HostCopy) -> bool:
        """Whether an adapter that is here could make room for this one, once nobody uses it."""
        return digest not in self._pinned or not self._fits_beside_pinned(copy)

    def _fits_beside_pinned(self, copy: HostCopy) -> bool:
        pinned = [self.room_of(digest) for digest in self._pinned]
        return copy.num_pages <= self.num_pages - sum(
            room.pages for room in pinned
        ) and copy.ends_bytes <= self._ends_budget - sum(room.ends_bytes for room in pinned)

    def victims(self, copy: HostCopy) -> list[bytes] | None:
        """Who has to go before this adapter can be placed; None when even that would not do."""
        if not self.lacking(copy).is_enough:
            return None
        ranked = self._order.ranked(self.evictable(copy), self._cost)
        pages = copy.num_pages - len(self._free)
        ends = copy.ends_bytes + self._ends_bytes - self._ends_budget
        chosen: list[bytes] = []
        for digest in ranked:
            if ends > 0 and self._residents[digest].ends_bytes:
                chosen.append(digest)
                pages -= self.room_of(digest).pages
                ends -= self.room_of(digest).ends_bytes
        for digest in ranked:
            if pages > 0 and digest not in chosen:
                chosen.append(digest)
                pages -= self.room_of(digest).pages
        return chosen

    # ---- what changes it ----------------------------------------------------------------------------

    def place(self, digest: bytes, copy: HostCopy) -> StepAdapter:
        """Gives free pages and a new adapter id to an adapter; its `victims` have been evicted.

        The caller writes the weights into the pages before it lets any sequence acquire them.
        """
        assert digest not in self._residents, "placed twice"
        assert copy.num_pages <= len(self._free), "placed without room"
        pages = tuple(self._free.pop() for _ in range(copy.num_pages))
        adapter = StepAdapter(
            self._next_id,
            pages,
            copy.rank,
            has_vectors=copy.has_vectors,
            has_ends=copy.ends_bytes > 0,
            vocab_size=copy.vocab_size,
        )
        self._next_id += 1
        self._residents[digest] = _Resident(adapter, copy.ends_bytes)
        self._ends_bytes += copy.ends_bytes
        self._unreferenced.add(digest)
        self._order.use(digest)
        return adapter

    def acquire(self, digest: bytes) -> StepAdapter:
        """Takes one reference for a sequence; the pages stay as they are until it is released."""
        entry = self._residents[digest]
        self._unreferenced.discard(digest)
        entry.references += 1
        return entry.adapter

    def release(self, digest: bytes) -> None:
        """Gives one sequence's reference back."""
        entry = self._residents[digest]
        assert entry.references > 0, "an adapter released more often than acquired"
        entry.references -= 1
        self._order.use(digest)
        if entry.references == 0:
            self._unreferenced.add(digest)

    def evict(self, digest: bytes, *, for_room: bool = False) -> StepAdapter:
        """Frees the pages of an adapter that nobody references, and returns what it was.

        Args:
            for_room: it goes because of another, and not for its own sake.
        """
        assert digest in self._unreferenced, "evicting an adapter that is in use, or that is not here"
        if for_room:
            self._order.evicted(digest, self._cost)
        else:
            self._order.forget(digest)
        self._unreferenced.remove(digest)
        self._pinned.discard(digest)
        entry = self._residents.pop(digest)
        self._ends_bytes -= entry.ends_bytes
        self._free.extend(reversed(entry.adapter.pages))
        return entry.adapter

    def can_pin(self, num_pages: int) -> bool:
        """Whether so many pages more may be pinned."""
        return self.num_pinned + num_pages <= PINNED_SHARE * self.num_pages

    def pin(self, digest: bytes) -> bool:
        """Keeps an adapter that is on the device there, if its pages `can_pin`; returns whether it is."""
        if digest not in self._pinned and self.can_pin(len(self._residents[digest].adapter.pages)):
            self._pinned.add(digest)
        return digest in self._pinned

    def unpin(self, digest: bytes) -> None:
        """Lets an adapter go like any other; one that is not pinned is no error."""
        self._pinned.discard(digest)

    def pinned(self) -> frozenset[bytes]:
        """The adapters that are pinned here now."""
        return frozenset(self._pinned)

    def check(self, users: Iterable[bytes] | None = None) -> None:
        """Asserts that every page is free or owned by exactly one adapter, and that the counts are right.

        Args:
            users: the digest of each sequence that holds a reference, once per sequence.
        """
        owned = [page for entry in self._residents.values() for page in entry.adapter.pages]
        assert sorted(owned + self._free) == list(range(self.num_pages)), "a page is lost or has two owners"
        ids = [entry.adapter.adapter_id for entry in self._residents.values()]
        assert len(set(ids)) == len(ids) and all(0 < i < self._next_id for i in ids), "an id is not unique"
        for digest, entry in self._residents.items():
            assert (digest in self._unreferenced) == (entry.references == 0), "the eviction list is wrong"
            assert len(entry.adapter.pages) >= pages_for_rank(entry.adapter.rank)
        assert self._pinned <= set(self._residents), "pinned, but not here"
        assert self.num_pinned <= PINNED_SHARE * self.num_pages
        assert self._ends_bytes == sum(entry.ends_bytes for entry in self._residents.values())
        assert self._ends_bytes <= self._ends_budget
        if users is not None:
            counts = dict.fromkeys(self._residents, 0)
            for digest in users:
                counts[digest] += 1
            for digest, entry in self._residents.items():
                assert entry.references == counts[digest], "references differ from the sequences that run"

    def _pages_of(self, digests: Iterable[bytes]) -> int:
        return sum(len(self._residents[digest].adapter.pages) for digest in digests)

    def _cost(self, digest: bytes) -> float:
        return reload_cost(len(self._residents[digest].adapter.pages), in_host=self._in_host(digest))
