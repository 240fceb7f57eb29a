"""Rank pages: placing by rank, eviction, references, and a state machine over all of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.rank_pages import RankPages, pages_for_rank


@pytest.mark.parametrize(("rank", "pages"), [(1, 1), (8, 1), (16, 1), (17, 2), (64, 4)])
def test_an_adapter_takes_pages_by_its_rank(rank: int, pages: int) -> None:
    pool = RankPages(4)
    adapter = pool.place(b"a", rank)
    assert adapter is not None and len(adapter.pages) == pages == pages_for_rank(rank)
    assert pool.num_available == 4, "nobody references it yet"
    pool.acquire(b"a")
    assert pool.num_available == 4 - pages
    pool.check([b"a"])


def test_the_least_recently_used_goes_first_and_referenced_ones_stay() -> None:
    pool = RankPages(3)
    for digest in (b"a", b"b", b"c"):
        assert pool.place(digest, 16) is not None
    for digest in (b"b", b"a", b"c"):
        pool.acquire(digest)
    pool.release(b"c")
    pool.release(b"b")
    assert pool.place(b"d", 16) is not None
    assert pool.resident(b"c") is None and pool.resident(b"b") is not None
    assert pool.place(b"e", 48) is None, "a page of `a` is referenced"
    assert pool.resident(b"b") is not None and pool.resident(b"d") is not None, "a refusal evicts nobody"
    pool.check([b"a"])


def test_ids_are_not_used_again() -> None:
    pool = RankPages(1)
    ids = []
    for number in range(5):
        adapter = pool.place(b"%d" % number, 8)
        assert adapter is not None
        ids.append(adapter.adapter_id)
    again = pool.place(b"0", 8)
    assert again is not None
    assert len({*ids, again.adapter_id, 0}) == 7


def test_an_adapter_in_use_cannot_be_evicted() -> None:
    pool = RankPages(1)
    pool.place(b"a", 8)
    pool.acquire(b"a")
    with pytest.raises(AssertionError, match="in use"):
        pool.evict(b"a")


class PagesMachine(RuleBasedStateMachine):
    """Random placing, using and evicting; the model keeps who uses what, and what pages that one saw."""

    digests = st.integers(0, 6).map(lambda number: b"adapter %d" % number)

    def __init__(self) -> None:
        super().__init__()
        self.pool = RankPages(5)
        self.users: list[tuple[bytes, tuple[int, ...], int]] = []
        self.seen_ids: set[int] = set()

    @rule(digest=digests, rank=st.integers(1, 64))
    def place(self, digest: bytes, rank: int) -> None:
        if self.pool.resident(digest) is not None:
            return
        available = self.pool.num_available
        adapter = self.pool.place(digest, rank)
        assert (adapter is not None) == (pages_for_rank(rank) <= available)
        if adapter is not None:
            assert adapter.adapter_id not in self.seen_ids
            self.seen_ids.add(adapter.adapter_id)

    @rule(digest=digests)
    def acquire(self, digest: bytes) -> None:
        if self.pool.resident(digest) is not None:
            adapter = self.pool.acquire(digest)
            self.users.append((digest, adapter.pages, adapter.adapter_id))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.users:
            index = data.draw(st.integers(0, len(self.users) - 1))
            self.pool.release(self.users.pop(index)[0])

    @rule(digest=digests)
    def evict(self, digest: bytes) -> None:
        if self.pool.resident(digest) is not None and not self.pool.references(digest):
            self.pool.evict(digest)

    @invariant()
    def users_keep_their_pages(self) -> None:
        self.pool.check([digest for digest, _, _ in self.users])
        for digest, pages, adapter_id in self.users:
            resident = self.pool.resident(digest)
            assert resident is not None
            assert (resident.pages, resident.adapter_id) == (pages, adapter_id)


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
