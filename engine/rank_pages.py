"""The rank pages: which adapter owns each page of the device's adapter memory, and who is using it.

A page holds 16 rank rows of every adapted projection in every layer, so an adapter takes as many pages as
its rank needs, anywhere in the pool. An adapter with references is never moved or evicted; one without
stays until its pages are wanted, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.step import StepAdapter

PAGE_RANK = 16
"""Rank rows in a page; the kernels' layout is built on it."""


def pages_for_rank(rank: int) -> int:
    """How many pages an adapter of this rank takes."""
    return -(-rank // PAGE_RANK)


@dataclass(slots=True)
class _Resident:
    adapter: StepAdapter
    references: int = 0


class RankPages:
    """The only owner of the page ↔ digest map and of its reference counts (one per sequence).

    Not thread-safe: it lives on the loop's thread. It moves no weights; who places an adapter writes its
    pages before anyone acquires it.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"a pool cannot have {num_pages} pages")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._residents: dict[bytes, _Resident] = {}
        self._unreferenced: OrderedDict[bytes, None] = OrderedDict()
        self._next_id = 1

    @property
    def num_available(self) -> int:
        """Pages that are free, or could be: those of adapters that nobody references."""
        evictable = sum(len(self._residents[digest].adapter.pages) for digest in self._unreferenced)
        return len(self._free) + evictable

    def resident(self, digest: bytes) -> StepAdapter | None:
        """The pages of an adapter that is on the device. Valid until its last reference is released."""
        entry = self._residents.get(digest)
        return entry.adapter if entry else None

    def residents(self) -> Mapping[bytes, StepAdapter]:
        """A copy of what is on the device, by digest."""
        return {digest: entry.adapter for digest, entry in self._residents.items()}

    def references(self, digest: bytes) -> int:
        """How many sequences use the adapter now; 0 also when it is not on the device."""
        entry = self._residents.get(digest)
        return entry.references if entry else 0

    def place(self, digest: bytes, rank: int) -> StepAdapter | None:
        """Gives pages and a new adapter id to an adapter, evicting unreferenced ones as needed.

        Returns None, and changes nothing, when too many pages are referenced. The caller writes the
        weights into the pages before it lets any sequence acquire them.
        """
        assert digest not in self._residents, "placed twice"
        count = pages_for_rank(rank)
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self.evict(next(iter(self._unreferenced)))
        pages = tuple(self._free.pop() for _ in range(count))
        adapter = StepAdapter(self._next_id, pages, rank)
        self._next_id += 1
        self._residents[digest] = _Resident(adapter)
        self._unreferenced[digest] = None
        return adapter

    def acquire(self, digest: bytes) -> StepAdapter:
        """Takes one reference for a sequence; the pages stay as they are until it is released."""
        entry = self._residents[digest]
        if entry.references == 0:
            del self._unreferenced[digest]
        entry.references += 1
        return entry.adapter

    def release(self, digest: bytes) -> None:
        """Gives one sequence's reference back."""
        entry = self._residents[digest]
        assert entry.references > 0, "an adapter released more often than acquired"
        entry.references -= 1
        if entry.references == 0:
            self._unreferenced[digest] = None

    def evict(self, digest: bytes) -> None:
        """Frees the pages of an adapter that nobody references."""
        assert digest in self._unreferenced, "evicting an adapter that is in use, or that is not here"
        del self._unreferenced[digest]
        self._free.extend(reversed(self._residents.pop(digest).adapter.pages))

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
            assert len(entry.adapter.pages) == pages_for_rank(entry.adapter.rank)
        if users is not None:
            counts = dict.fromkeys(self._residents, 0)
            for digest in users:
                counts[digest] += 1
            for digest, entry in self._residents.items():
                assert entry.references == counts[digest], "references differ from the sequences that run"
