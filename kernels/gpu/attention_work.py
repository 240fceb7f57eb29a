"""The work list of attention in a mixed step: which sequences decode, and the others' queries in tiles.

Made once a step, on the device, from the plan. A captured step has room for many more sequences than it
mostly holds, and in each layer a program for each of them would have to find out that it has nothing to do.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.gpu.launch import ceil_div, kernel, list_block
from kernels.plans import AttentionPlan, AttentionWork


def make_work(plan: AttentionPlan, tile_queries: int) -> AttentionWork:
    """Launches the kernel that fills the list, in tiles of up to ``tile_queries``.

    Sizes come from the shapes of the plan's tensors and ``max_query_len``: under graph capture these must be
    the largest that any replay needs.
    """
    num_seqs, num_tokens = plan.context_lens.shape[0], plan.slots.shape[0]
    device = plan.context_lens.device
    max_tiles = num_tokens // tile_queries + max(1, min(num_seqs, num_tokens // 2))
    decodes = torch.empty(num_seqs, dtype=torch.int32, device=device)
    tiles = torch.empty((max_tiles, 2), dtype=torch.int32, device=device)
    counts = torch.empty(2, dtype=torch.int32, device=device)
    _make_work[(max(1, ceil_div(plan.max_query_len, tile_queries)),)](
        plan.query_starts,
        plan.context_lens,
        decodes,
        tiles,
        counts,
        num_seqs,
        TILE_QUERIES=tile_queries,
        BLOCK=list_block(num_seqs),
    )
    # The layers' kernels read the list before they wait for what precedes them. A plain copy in between,
    # which starts only when the list is written, makes that safe.
    return AttentionWork(decodes, tiles, counts.clone(), tile_queries)


@kernel(do_not_specialize=["num_seqs"])
def _make_work(
    query_starts,
    context_lens,
    decodes,
    tiles,
    counts,
    num_seqs,
    TILE_QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program k writes the k-th tile of every sequence."""
    k = tl.program_id(0)
    s = tl.arange(0, BLOCK)
    live = (s < num_seqs) & (tl.load(context_lens + s, s < num_seqs, 0) > 0)
    count = tl.load(query_starts + s + 1, live, 0) - tl.load(query_starts + s, live, 0)
    # For a sequence by itself decode is not launched.
    is_decode = live & (count == 1) & (num_seqs > 1)
    num_tiles = tl.where(live & (is_decode == 0), tl.cdiv(count, TILE_QUERIES), 0)
    record = tiles + (tl.cumsum(num_tiles, 0) - num_tiles + k) * 2
    tl.store(record, s, num_tiles > k)
    tl.store(record + 1, tl.zeros_like(s) + k * TILE_QUERIES, num_tiles > k)
    if k == 0:
        place = tl.cumsum(is_decode.to(tl.int32), 0) - 1
        tl.store(decodes + place, s, is_decode)
        tl.store(counts, tl.sum(is_decode.to(tl.int32), 0))
        tl.store(counts + 1, tl.sum(num_tiles, 0))
