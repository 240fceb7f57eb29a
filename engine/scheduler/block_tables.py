"""Block tables: how sequences come by their blocks, share them, and let them go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from engine.block_pool import BLOCK_SIZE, BlockPool, block_hashes
from engine.sequence import Sequence
from engine.step import Pooling


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockTables:
    """The only code that changes a sequence's block table.

    A running sequence's table, with ``c`` tokens computed of ``t`` known::

        |  hit  |  hit  | own, full | own, partial | own, empty |
        0                         c ^              t            ^ blocks_for(t) * 16
          └─ published: shared, never written ─┘└─ written by this sequence alone ─┘
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._headroom = pool.num_blocks // 100

    def admit(self, seq: Sequence, *, num_running: int) -> bool:
        """Gives a sequence all blocks for the tokens it has, as many as possible from the prefix map.

        At least one token is left to compute, whatever the prefix map has: its logits are needed. One
        block in a hundred, but no more than there are running sequences, stays free for their growth.
        Returns False, and changes nothing, when blocks are short.
        """
        pool = self._pool
        hits = self._hits(seq)
        if self._lacking(seq, hits, num_running) > 0:
            return False
        pool.acquire(hits)
        own = pool.allocate(blocks_for(len(seq.tokens)) - len(hits))
        assert own is not None
        seq.block_ids = hits + own
        seq.num_computed = len(hits) * BLOCK_SIZE
        seq.num_published = len(hits)
        return True

    def headroom(self, num_running: int) -> int:
        """How many blocks `admit` leaves free for the growth of those that run."""
        return min(self._headroom, num_running)

    def lacking(self, seq: Sequence, *, num_running: int) -> int:
        """How many more blocks would have to be free for `admit`; 0 or less: none."""
        return self._lacking(seq, self._hits(seq), num_running)

    def _hits(self, seq: Sequence) -> list[int]:
        """The blocks that need not be computed. Logprobs and mean of a prompt follow from computing it."""
        most = len(seq.tokens) - 1
        if seq.request.prompt_logprobs is not None and seq.num_scored < seq.num_prompt:
            most = seq.num_scored - 1
        if seq.request.pooling is Pooling.MEAN:
            most = 0
        return self._pool.lookup(seq.block_hashes[: most // BLOCK_SIZE])

    def _lacking(self, seq: Sequence, hits: list[int], num_running: int) -> int:
        missing = blocks_for(len(seq.tokens)) - len(hits)
        return missing + self.headroom(num_running) - (self._pool.num_idle - self._pool.count_idle(hits))

    def prepare_write(self, seq: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Makes sure that the next token of a decoding sequence has a place that is its own.

        Adds a block at a block's border. A block that others share, or could find, is replaced by a
        copy, noted as (source, target) in ``copies``. Returns False, and changes nothing, when there is
        no block to be had.
        """
        index = seq.num_computed // BLOCK_SIZE
        if index < len(seq.block_ids) and self._pool.is_writable(seq.block_ids[index]):
            return True
        new = self._pool.allocate(1)
        if new is None:
            return False
        if index == len(seq.block_ids):
            seq.block_ids.append(new[0])
            return True
        shared = seq.block_ids[index]
        copies.append((shared, new[0]))
        seq.block_ids = [*seq.block_ids[:index], new[0], *seq.block_ids[index + 1 :]]
        self._pool.release([shared])
        return True

    def prepare_beams(self, beams: Seq[Sequence], copies: list[tuple[int, int]]) -> bool:
        """Makes sure that all tokens that the beams of a search lack have places that are their own.

        As `prepare_write`, for all of them or for none: of those that share a block, the last keeps it, so a
        beam that is its parent's only child copies nothing.
        """
        writing = [seq for seq in beams if seq.num_missing]
        sharing = Counter(_block_to_write(seq) for seq in writing)
        del sharing[None]
        pool = self._pool
        wanted = sum(
            count - pool.is_writable(block, num_holders=count)
            for block, count in sharing.items()
            if block is not None
        )
        wanted += sum(blocks_for(len(seq.tokens)) - len(seq.block_ids) for seq in writing)
        if wanted > pool.num_idle:
            return False
        for seq in writing:
            fits = self.prepare_write(seq, copies)
            more = pool.allocate(blocks_for(len(seq.tokens)) - len(seq.block_ids))
            assert fits and more is not None
            seq.block_ids += more
        return True

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """Gives a beam the table of another, all of which is computed: it shares every block, the last,
        partial one too, which is copied by whoever writes to it. What it held is given back, and the table
        that plans may name stays as it was.
        """
        held, child.block_ids = child.block_ids, list(parent.block_ids)
        self._pool.acquire(child.block_ids)
        self._pool.release(held)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed = parent.num_computed
        child.num_published = parent.num_published

    def fork(self, leader: Sequence, sibling: Sequence) -> None:
        """Starts a sibling from the leader's prompt, all of which is computed: it shares the prompt's blocks.

        The prompt's last token is left for it to compute again, since its logits are needed. The leader may
        be ahead by a step already, and has written beyond the prompt into the last of them: what is there is
        not in the sibling's context, and whoever writes next takes a copy.
        """
        sibling.block_ids = leader.block_ids[: blocks_for(len(sibling.tokens))]
        self._pool.acquire(sibling.block_ids)
        sibling.num_computed = len(sibling.tokens) - 1
        sibling.num_published = sibling.num_computed // BLOCK_SIZE

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Makes the blocks of the first ``num_tokens`` tokens findable, those that are full.

        Call it when the step that wrote the last of them has run.
        """
        full = num_tokens // BLOCK_SIZE
        while seq.num_published < full:
            index = seq.num_published
            if index == len(seq.block_hashes):
                tokens = seq.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                seq.block_hashes += block_hashes(seq.request.parent_hash(seq.block_hashes), tokens)
            self._pool.publish(seq.block_ids[index], seq.block_hashes[index])
            seq.num_published += 1

    def forget(self, seq: Sequence) -> None:
        """Makes what a sequence has published, and given back since, not to be found by anyone."""
        found = self._pool.lookup(seq.block_hashes)
        self._pool.acquire(found)
        self._pool.forget(found)
        self._pool.release(found)

    def release(self, seq: Sequence, *, spoiled: bool = False) -> None:
        """Takes the table away. ``spoiled``: what the blocks contain is not to be found by anyone."""
        if spoiled:
            self._pool.forget(seq.block_ids)
        self._pool.release(seq.block_ids)
        seq.block_ids = []
        seq.num_computed = 0
        seq.num_published = 0


def _block_to_write(seq: Sequence) -> int | None:
    """The block that the next token goes into; None where a new one begins."""
    index = seq.num_computed // BLOCK_SIZE
    return seq.block_ids[index] if index < len(seq.block_ids) else None
