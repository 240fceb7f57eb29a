"""Rank pages: placing by rank, eviction, pins, references, and a state machine against a plain model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from builders import FakeAdapter
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.rank_pages import RankPages, pages_for_rank
from engine.step import StepAdapter


def place(pool: RankPages, digest: bytes, rank: int, *, ends_bytes: int = 0) -> StepAdapter | None:
    """Brings an adapter, and sends away who has to go for it, as the gate does."""
    copy = FakeAdapter(digest, rank, ends_bytes=ends_bytes)
    victims = pool.victims(copy)
    if victims is None:
        return None
    for victim in victims:
        pool.evict(victim, for_room=True)
    return pool.place(digest, copy)


@pytest.mark.parametrize(("rank", "pages"), [(1, 1), (8, 1), (16, 1), (17, 2), (64, 4)])
def test_an_adapter_takes_pages_by_its_rank(rank: int, pages: int) -> None:
    pool = RankPages(4)
    adapter = place(pool, b"a", rank)
    assert adapter is not None and len(adapter.pages) == pages == pages_for_rank(rank)
    assert pool.num_available == 4, "nobody references it yet"
    pool.acquire(b"a")
    assert pool.num_available == 4 - pages
    pool.check([b"a"])


def test_vectors_that_find_no_room_above_the_ranks_take_a_page_more() -> None:
    pool = RankPages(4)
    copies = [FakeAdapter(name, rank, has_vectors=True) for name, rank in ((b"a", 14), (b"b", 15))]
    placed = [pool.place(copy.digest, copy) for copy in copies]
    assert [(len(adapter.pages), adapter.has_vectors) for adapter in placed] == [(1, True), (2, True)]
    pool.check([])


def test_the_least_recently_used_goes_first_and_referenced_ones_stay() -> None:
    pool = RankPages(3)
    for digest in (b"a", b"b", b"c"):
        assert place(pool, digest, 16) is not None
    for digest in (b"b", b"a", b"c"):
        pool.acquire(digest)
    pool.release(b"c")
    pool.release(b"b")
    assert place(pool, b"d", 16) is not None
    assert pool.resident(b"c") is None and pool.resident(b"b") is not None
    assert place(pool, b"e", 48) is None, "a page of `a` is referenced"
    assert pool.resident(b"b") is not None and pool.resident(b"d") is not None, "a refusal evicts nobody"
    pool.check([b"a"])


def test_what_would_have_to_be_read_again_outlives_what_waits_in_host_memory() -> None:
    in_host = {b"b", b"c", b"d"}
    pool = RankPages(3, in_host=in_host.__contains__)
    for digest in (b"a", b"b", b"c"):
        place(pool, digest, 16)
    place(pool, b"d", 16)
    assert pool.resident(b"a") is not None and pool.resident(b"b") is None, "`a` is older, and dearer"
    for number in range(60):
        in_host.add(b"%d" % number)
        place(pool, b"%d" % number, 16)
    assert pool.resident(b"a") is None, "but not for ever"
    pool.check([])


def test_of_adapters_to_be_read_again_the_large_one_goes_first() -> None:
    pool = RankPages(5, in_host=lambda digest: False)
    place(pool, b"small", 16)
    place(pool, b"large", 64)
    place(pool, b"new", 16)
    assert pool.resident(b"small") is not None and pool.resident(b"large") is None


def test_pinned_adapters_stay_and_may_hold_half_of_the_pages() -> None:
    pool = RankPages(4)
    for digest in (b"a", b"b", b"c"):
        place(pool, digest, 16)
    assert [pool.pin(digest) for digest in (b"a", b"b", b"c")] == [True, True, False]
    for number in range(6):
        place(pool, b"%d" % number, 16)
    assert pool.resident(b"a") is not None and pool.resident(b"b") is not None and pool.resident(b"c") is None
    pool.unpin(b"a")
    place(pool, b"x", 48)
    assert pool.resident(b"a") is None and pool.resident(b"b") is not None
    assert place(pool, b"y", 64) is not None, "what could never come beside them sends them away"
    assert pool.resident(b"b") is None and not pool.pinned()
    pool.check([])


def test_bytes_outside_the_pages_have_a_budget_of_their_own() -> None:
    pool = RankPages(8, ends_bytes=100)
    place(pool, b"plain", 16)
    place(pool, b"a", 16, ends_bytes=60)
    place(pool, b"b", 16, ends_bytes=40)
    adapter = place(pool, b"c", 16, ends_bytes=50)
    assert adapter is not None and adapter.has_ends
    assert set(pool.residents()) == {b"plain", b"b", b"c"}, "pages are free, but `a` holds the bytes"
    pool.acquire(b"b")
    pool.acquire(b"c")
    assert place(pool, b"d", 16, ends_bytes=20) is None
    pool.check([b"b", b"c"])


def test_ids_are_not_used_again() -> None:
    pool = RankPages(1)
    ids = []
    for number in range(5):
        adapter = place(pool, b"%d" % number, 8)
        assert adapter is not None
        ids.append(adapter.adapter_id)
    again = place(pool, b"0", 8)
    assert again is not None
    assert len({*ids, again.adapter_id, 0}) == 7


def test_an_adapter_in_use_cannot_be_evicted() -> None:
    pool = RankPages(1)
    place(pool, b"a", 8)
    pool.acquire(b"a")
    with pytest.raises(AssertionError, match="in use"):
        pool.evict(b"a")


@dataclass
class Entry:
    """An adapter as the model sees it."""

    size: int
    ends: int
    base: float
    used: int
    users: int = 0
    pinned: bool = False


class Model:
    """What the pages promise, said as plainly as can be: evict the least valued until there is room."""

    def __init__(self, num_pages: int, ends_bytes: int, in_host: set[bytes]) -> None:
        self.num_pages, self.ends_bytes, self.in_host = num_pages, ends_bytes, in_host
        self.entries: dict[bytes, Entry] = {}
        self.inflation, self.now = 0.0, 0

    def touch(self, digest: bytes) -> None:
        self.now += 1
        self.entries[digest].base, self.entries[digest].used = self.inflation, self.now

    def value(self, digest: bytes) -> tuple[float, int]:
        entry = self.entries[digest]
        cost = 1.0 if digest in self.in_host else 5 + 1 / entry.size
        return entry.base + cost, entry.used

    def room(self, without: set[bytes]) -> tuple[int, int]:
        kept = [entry for digest, entry in self.entries.items() if digest not in without]
        return self.num_pages - sum(e.size for e in kept), self.ends_bytes - sum(e.ends for e in kept)

    def place(self, digest: bytes, size: int, ends: int) -> set[bytes] | None:
        """Who goes, or None when it cannot come."""
        fits_beside_pinned = self.room({d for d, e in self.entries.items() if not e.pinned})
        spare_pins = size <= fits_beside_pinned[0] and ends <= fits_beside_pinned[1]
        left = [d for d, e in self.entries.items() if not e.users and not (e.pinned and spare_pins)]
        pages, spare = self.room(set(left))
        if pages < size or spare < ends:
            return None
        left.sort(key=self.value)
        gone: set[bytes] = set()
        while self.room(gone)[1] < ends:
            gone.add(next(d for d in left if d not in gone and self.entries[d].ends))
        while self.room(gone)[0] < size:
            gone.add(next(d for d in left if d not in gone))
        for victim in gone:
            self.inflation = max(self.inflation, self.value(victim)[0])
        for victim in gone:
            del self.entries[victim]
        self.entries[digest] = Entry(size, ends, 0.0, 0)
        self.touch(digest)
        return gone


class PagesMachine(RuleBasedStateMachine):
    """Random placing, using, pinning and evicting, each step as the model says."""

    digests = st.integers(0, 7).map(lambda number: b"adapter %d" % number)

    def __init__(self) -> None:
        super().__init__()
        self.in_host: set[bytes] = set()
        self.pool = RankPages(6, ends_bytes=100, in_host=self.in_host.__contains__)
        self.model = Model(6, 100, self.in_host)
        self.users: list[tuple[bytes, StepAdapter]] = []
        self.seen_ids: set[int] = set()

    @rule(digest=digests, rank=st.integers(1, 80), ends=st.sampled_from([0, 0, 0, 30, 60]))
    def place(self, digest: bytes, rank: int, ends: int) -> None:
        if digest in self.model.entries:
            return
        before = set(self.pool.residents())
        adapter = place(self.pool, digest, rank, ends_bytes=ends)
        gone = self.model.place(digest, pages_for_rank(rank), ends)
        assert (adapter is None) == (gone is None)
        if adapter is not None:
            assert before - set(self.pool.residents()) == gone
            assert adapter.adapter_id not in self.seen_ids
            self.seen_ids.add(adapter.adapter_id)

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.model.entries)))
        self.model.entries[digest].users += 1
        self.users.append((digest, self.pool.acquire(digest)))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        digest, _ = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.pool.release(digest)
        self.model.entries[digest].users -= 1
        self.model.touch(digest)

    @rule(digest=digests)
    def evict(self, digest: bytes) -> None:
        if digest in self.model.entries and not self.model.entries[digest].users:
            self.pool.evict(digest)
            del self.model.entries[digest]

    @rule(digest=digests, pinned=st.booleans())
    def pin(self, digest: bytes, pinned: bool) -> None:
        entry = self.model.entries.get(digest)
        if not pinned:
            self.pool.unpin(digest)
            if entry is not None:
                entry.pinned = False
        elif entry is not None:
            sizes = sum(e.size for e in self.model.entries.values() if e.pinned and e is not entry)
            entry.pinned = entry.pinned or 2 * (sizes + entry.size) <= self.model.num_pages
            assert self.pool.pin(digest) == entry.pinned

    @rule(digest=digests)
    def come_to_or_leave_host_memory(self, digest: bytes) -> None:
        self.in_host ^= {digest}

    @invariant()
    def the_pool_is_as_the_model(self) -> None:
        self.pool.check([digest for digest, _ in self.users])
        assert set(self.pool.residents()) == set(self.model.entries)
        for digest, adapter in self.users:
            assert self.pool.resident(digest) == adapter, "a user's pages were given to another"


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
