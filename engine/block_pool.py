"""The KV blocks: who holds each one, and which prefix each one still remembers.

All blocks exist from the start. A block is *held* (one or more references) or *idle*. An idle block keeps
the hash of what it contains and can be revived by a later prompt, until it is the one given out next::

    allocate ──▶ held ──publish──▶ held, hashed ──release──▶ idle, hashed ──▶ revived by acquire
                  │                                              │
                  └────────release──▶ idle, no hash ◀────────────┴─ given out again, hash lost

Idle blocks without a hash are given out first, then the hashed ones, least recently used first.

A hash is a chain over the prompt, so that equal hashes mean equal tokens *and* equal everything before
them, under the same root: model, KV dtype, adapter and cache scope.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

BLOCK_SIZE = 16
"""Tokens in a block; the kernels' layout is built on it."""


def root_hash(model_digest: bytes, kv_dtype: str, adapter_digest: bytes, cache_scope: bytes) -> bytes:
    """The parent of every first block: what must agree before two prefixes may share memory.

    Each part is preceded by its length, so that no two different tuples give the same bytes.
    ``adapter_digest`` is empty for the base model, and for an adapter that applies from a later token on.
    """
    state = sha256(b"loraplex block root")
    for part in (model_digest, kv_dtype.encode(), adapter_digest, cache_scope):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def activation_hash(parent: bytes, adapter_digest: bytes, offset: int) -> bytes:
    """The parent of the block in which an activated adapter begins to apply, at its token ``offset``.

    It stands between the base model's blocks, the last of which is hashed ``parent``, and the adapter's::

        root ─▶ base ─▶ base ─▶ activation ─▶ base | adapter ─▶ adapter
                                              0  offset      16

    So all adapters that begin later, and the base model, share the blocks before.
    """
    return sha256(b"loraplex activation" + parent + adapter_digest + bytes([offset])).digest()


def block_hashes(parent: bytes, tokens: Sequence[int]) -> list[bytes]:
    """The chain of hashes of the full blocks of ``tokens``, which follow the block hashed ``parent``.

    Tokens of a last, partial block are ignored. Token ids must fit into 32 bits.
    """
    words = array("I", tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE])
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    width = BLOCK_SIZE * words.itemsize
    hashes: list[bytes] = []
    for start in range(0, len(data), width):
        parent = sha256(parent + data[start : start + width]).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """The only owner of KV blocks, their reference counts and the prefix map.

    Not thread-safe: it lives on the loop's thread. Its verbs never block and never fail half way.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def has_prefix_cache(self) -> bool:
        """Whether blocks that nobody holds can be found again by their hash."""
        return self._caching

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds; all of them can be allocated."""
        return len(self._idle)

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of ``hashes``. They stay as they are until `allocate`."""
        found: list[int] = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are idle, that is, how many `acquire` would take from `num_idle`."""
        return sum(self._references[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to each block; idle ones are revived with what they contain."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` idle blocks, with one reference each and their old contents forgotten.

        Returns None, and changes nothing, when there are not so many.
        """
        if count > len(self._idle):
            return None
        blocks = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._drop_hash(block)
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back one reference to each block of a table, in table order.

        The end of the table becomes idle first, so that a prefix outlives what followed it.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released more often than acquired"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._idle[block] = None
                if self._hash_of[block] is None:
                    self._idle.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> None:
        """Lets later prompts find a held, completely written block under ``key``.

        Where another block is known under ``key`` already, that one stays, and this one has no hash.
        """
        assert self._references[block] > 0, f"block {block} published while nobody holds it"
        if self._caching and self._hash_of[block] is None and key not in self._block_of:
            self._hash_of[block] = key
            self._block_of[key] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Makes held blocks unfindable: what they contain is not to be trusted. Holders keep them."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is not held by anyone"
            self._drop_hash(block)

    def is_writable(self, block: int, *, num_holders: int = 1) -> bool:
        """Whether ``block`` may be written to, by the last of so many of its holders once the others have let
        it go: nobody else holds it, and nobody can find it.
        """
        return self._references[block] == num_holders and self._hash_of[block] is None

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Asserts that every block is idle or held and never both, and that the prefix map agrees.

        Args:
            holders: the block tables of everyone who holds blocks; with it, the counts must match exactly.
        """
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert all(count >= 0 for count in self._references), "a negative reference count"
        assert held.isdisjoint(self._idle), f"both held and idle: {held & self._idle.keys()}"
        assert len(held) + len(self._idle) == self.num_blocks, "a block is neither held nor idle"
        for key, block in self._block_of.items():
            assert self._hash_of[block] == key, f"the prefix map disagrees about block {block}"
        assert sum(key is not None for key in self._hash_of) == len(self._block_of), "a hash is not mapped"
        if holders is None:
            return
        counts = [0] * self.num_blocks
        for table in holders:
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                counts[block] += 1
        assert counts == self._references, "reference counts differ from the tables that exist"

    def _drop_hash(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            del self._block_of[key]
            self._hash_of[block] = None
