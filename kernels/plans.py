"""What one step tells every kernel: computed once per step, read by every layer.

A step is a flat batch of ``T`` tokens that belong to ``S`` sequences. Tokens of one sequence are
contiguous and in order. A plan may be larger than the step it describes (static buffers under a captured
graph): the tail is padding, marked by index -1, and every kernel must leave such rows and blocks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SIZE = 16
"""Tokens whose keys and values one KV block holds."""

RANK_PAGE = 16
"""Rank rows of every adapted projection that one rank page holds."""

GAIN_ROW, SHIFT_ROW = RANK_PAGE - 2, RANK_PAGE - 1
"""Where the last page of an adapter that has vectors holds them, in ``b``; its ranks end before."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The work list that the GPU's attention makes of an ``AttentionPlan`` with more queries than one each.

    Attributes:
        decodes: int32 [S]. The sequences with one query, first of all.
        tiles: int32 [K, 2]. A sequence, and its first query of up to ``tile_queries``.
        counts: int32 [2]. How many of either there are.
    """

    decodes: torch.Tensor
    tiles: torch.Tensor
    counts: torch.Tensor
    tile_queries: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where each sequence's queries are in the batch, and where its keys and values are in the pool.

    Attributes:
        query_starts: int32 [S + 1]. Sequence ``s`` owns the flat rows ``query_starts[s]`` up to
            ``query_starts[s + 1]``.
        context_lens: int32 [S]. Tokens of the sequence whose KV is valid once this step has written its
            own. The queries are the last ones: row ``i`` of ``n`` sees ``context_len - n + i + 1`` keys.
        block_tables: int32 [S, max_blocks]. Block ids in token order, -1 beyond the last.
        slots: int64 [T]. ``block_id * BLOCK_SIZE + offset`` where each token's KV goes, -1 for padding.
        positions: int64 [T]. Position of each token in its sequence.
        max_query_len: the longest query, on the host (1 in pure decode).
        work: see ``kernels.paged_attention.prepare``.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    max_query_len: int
    work: AttentionWork | None = None


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """The work list that the GPU's LoRA kernels make of a ``LoraPlan``; see ``kernels.gpu.lora_tiles``."""

    tiles: torch.Tensor
    units: torch.Tensor
    counts: torch.Tensor
    adapted: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowVectors:
    """The tokens whose adapter scales or shifts the outputs of projections (DoRA, biases).

    Attributes:
        rows: int64 [K]. Flat indices, each once.
        pages: int64 [K]. The page that holds the vectors of each row's adapter.
    """

    rows: torch.Tensor
    pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Tokens grouped by adapter. The adapter is a property of the token, not of the sequence.

    Attributes:
        rows: int32 [R]. Flat indices of the tokens that an adapter applies to, grouped by adapter, in
            batch order within a group. Base tokens do not appear, so they cost nothing.
        segment_starts: int32 [N + 1]. Adapter ``n`` of this step owns ``rows[segment_starts[n]]`` up to
            ``rows[segment_starts[n + 1]]``.
        segment_pages: int32 [N, P]. The rank pages of adapter ``n`` in order, -1 beyond its last.
        segment_ranks: int32 [N]. Its live rank rows: page ``p`` has ``min(16, rank - 16 * p)`` of them.
        num_rows: R, on the host. 0: no kernel is launched.
        num_segments: N, on the host.
        tiles: on a GPU, filled by ``kernels.lora.prepare`` once a step, before the first layer.
        vectors: None where no adapter of the step has any: then nothing is launched for them.
    """

    rows: torch.Tensor
    segment_starts: torch.Tensor
    segment_pages: torch.Tensor
    segment_ranks: torch.Tensor
    num_rows: int
    num_segments: int
    tiles: LoraTiles | None = None
    vectors: RowVectors | None = None


@dataclass(frozen=True, slots=True)
class LoraPool:
    """The rank pages of one group of projections in one layer.

    A group is the projections that share an input: q/k/v, o, gate/up, down. Its ``M`` projections are
    shrunk together and expanded together, and their outputs lie side by side, as the fused base weight has
    them::

        a   [pages, M, 16, in]    page p, projection m: 16 rows of A
        b   [pages, 16, out]      page p: 16 rows of Bᵀ; columns splits[m] .. splits[m + 1] are projection m
        scales [pages, M] float32 alpha / r (or what stands for it), 0 where the adapter lacks the projection

    An adapter with vectors has two rows above its ranks in its last page: ``b[page, GAIN_ROW]`` and
    ``b[page, SHIFT_ROW]``, both [out], zero in the columns of projections that have none.

    Attributes:
        a, b: in the model's dtype. They may hold anything where nobody reads: in rows above an adapter's rank
            that are no vectors, and under a scale of 0.
        splits: M + 1 column offsets, from 0 to ``out``.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    splits: tuple[int, ...]
