"""The block pool: hashes, the verbs one by one, and a state machine against a brute-force model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from engine.block_pool import BLOCK_SIZE, BlockPool, block_hashes, root_hash
from engine.rank_pages import PAGE_RANK
from kernels import plans


def test_sizes_agree_with_the_kernels() -> None:
    assert (BLOCK_SIZE, PAGE_RANK) == (plans.BLOCK_SIZE, plans.RANK_PAGE)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_hashes_depend_on_all_that_went_before() -> None:
    root = root_hash(b"model", "float32", b"", b"tenant")
    tokens = list(range(3 * BLOCK_SIZE + 5))
    hashes = block_hashes(root, tokens)
    assert len(hashes) == 3 and len(set(hashes)) == 3
    changed = block_hashes(root, [99, *tokens[1:]])
    assert all(one != other for one, other in zip(hashes, changed, strict=True))
    last_changed = block_hashes(root, [*tokens[: 3 * BLOCK_SIZE - 1], 99])
    assert last_changed[:2] == hashes[:2] and last_changed[2] != hashes[2]
    assert block_hashes(hashes[0], tokens[BLOCK_SIZE:]) == hashes[1:], "the chain can be continued"


def test_root_tells_apart_all_of_its_parts() -> None:
    parts = (b"model", "float32", b"adapter", b"scope")
    variants = {
        root_hash(*parts),
        root_hash(b"other", *parts[1:]),
        root_hash(b"model", "bfloat16", b"adapter", b"scope"),
        root_hash(b"model", "float32", b"", b"scope"),
        root_hash(b"model", "float32", b"adapter", b""),
        root_hash(b"model", "float32", b"adapters", b"cope"),
        root_hash(b"model", "float32", b"", b"adapterscope"),
    }
    assert len(variants) == 7


def test_released_blocks_are_revived_until_they_are_given_out_again() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    for number, block in enumerate(blocks):
        pool.publish(block, key(number))
    pool.release(blocks)
    assert pool.lookup([key(0), key(1), key(2)]) == blocks
    pool.acquire(blocks)
    assert pool.num_idle == 1
    pool.release(blocks)
    assert pool.allocate(2) is not None
    assert pool.lookup([key(0)]) == blocks[:1], "the end of a prefix goes before its beginning"
    assert pool.lookup([key(0), key(1)]) == blocks[:1]
    assert pool.allocate(1) is not None
    assert pool.lookup([key(0)]) == []
    pool.check()


def test_blocks_without_a_hash_are_given_out_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain = pool.allocate(1), pool.allocate(3)
    assert cached is not None and plain is not None
    pool.publish(cached[0], key(0))
    pool.release(cached)
    pool.release(plain)
    assert set(pool.allocate(3) or ()) == set(plain)
    assert pool.lookup([key(0)]) == cached


def test_a_pool_without_blocks_is_refused() -> None:
    assert BlockPool(1).num_idle == 1
    with pytest.raises(ValueError, match="at least one block, not 0"):
        BlockPool(0)


def test_allocate_gives_all_or_nothing() -> None:
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert pool.num_idle == 2


def test_forgotten_blocks_cannot_be_found_though_they_are_held() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], key(0))
    assert not pool.is_writable(blocks[0]), "who may be found may not be written to"
    pool.forget(blocks)
    assert pool.lookup([key(0)]) == []
    assert pool.is_writable(blocks[0])
    pool.check([blocks])


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], key(0))
    assert pool.lookup([key(0)]) == []


def test_releasing_too_often_is_noticed() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Random verbs; the model is a plain list of tables, and what was published under which key."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.live: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """By block: the key under which it was published since it was last given out."""

    @rule(target=tables, count=st.integers(1, 4))
    def allocate(self, count: int) -> list[int]:
        idle = self.pool.num_idle
        blocks = self.pool.allocate(count)
        assert (blocks is not None) == (count <= idle)
        table = blocks or []
        assert not any(block in other for other in self.live for block in table), "given out while held"
        for block in table:
            self.content.pop(block, None)
        self.live.append(table)
        return table

    @rule(target=tables, keys=st.lists(st.integers(0, 7), max_size=4, unique=True))
    def find(self, keys: list[int]) -> list[int]:
        found = self.pool.lookup([key(number) for number in keys])
        assert [self.content[block] for block in found] == [key(number) for number in keys[: len(found)]]
        if len(found) < len(keys):
            assert key(keys[len(found)]) not in self.content.values(), "a published block was not found"
        before = self.pool.num_idle
        taken = self.pool.count_idle(found)
        self.pool.acquire(found)
        assert self.pool.num_idle == before - taken
        self.live.append(list(found))
        return self.live[-1]

    @rule(table=tables, number=st.integers(0, 7))
    def publish(self, table: list[int], number: int) -> None:
        if any(table is other for other in self.live) and table:
            self.pool.publish(table[0], key(number))
            if table[0] not in self.content and key(number) not in self.content.values():
                self.content[table[0]] = key(number)

    @rule(table=tables)
    def forget(self, table: list[int]) -> None:
        if any(table is other for other in self.live):
            self.pool.forget(table)
            for block in table:
                self.content.pop(block, None)

    @precondition(lambda self: self.live)
    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        self.live = [other for other in self.live if other is not table]
        self.pool.release(table)

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        self.pool.check(self.live)

    def teardown(self) -> None:
        for table in self.live:
            self.pool.release(table)
        self.pool.check([])
        assert self.pool.num_idle == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
