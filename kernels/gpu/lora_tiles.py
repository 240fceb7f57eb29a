"""The work list of a step's LoRA kernels, made on the device from the plan.

Made once a step and read by every layer. It is a kernel, not host code, so that a captured graph holds it: at
each replay it follows whatever the static buffers of the plan say, for any number of adapters.

    tiles  int32 [max_tiles, 5]   first of rows | rows | segment | its rank | its first page id
    units  int32 [max_units, 4]   first of rows | rows | page id | page number * 16 + live rank rows - 1

A tile is some rows of one segment: the unit of expand. Segments of up to 32 rows are cut into tiles of 16,
longer ones into tiles of 64, which come first, unless the step has no more than 256 tokens. A unit is one
tile under one rank page: the unit of shrink. ``counts`` holds how many tiles are live, how many units, and
how many tiles of 64; ``adapted`` a 1 for each token of the step that is in a tile.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.gpu.launch import ceil_div, kernel, list_block
from kernels.plans import LoraPlan, LoraTiles

FEW_ROWS = 16
MANY_ROWS = 64
_ALL_FEW = 256
"""In a step of no more tokens all tiles are of few. More programs then read a page, from the cache, and the
kernels hold the code for few rows alone."""


def has_many(num_tokens: int) -> bool:
    """Whether a tile of a step of so many tokens may have more than ``FEW_ROWS``."""
    return num_tokens > _ALL_FEW


def make_tiles(plan: LoraPlan, num_tokens: int) -> LoraTiles:
    """Launches the kernel that fills the work list of ``plan``, of a step of ``num_tokens``.

    Segments that are padding (no rows, or no rank) get no tile. Sizes of buffers and grid come from the
    shapes of the plan's tensors and ``num_tokens``: under graph capture these must be the largest that any
    replay needs. What kernels are compiled for comes from ``num_tokens`` and the width of the table alone.
    """
    num_segments, num_pages = plan.segment_pages.shape
    num_rows = plan.rows.shape[0]
    max_tiles = min(num_rows, num_rows // FEW_ROWS + num_segments)
    device = plan.rows.device
    tiles = torch.empty((max_tiles, 5), dtype=torch.int32, device=device)
    units = torch.empty((max_tiles * num_pages, 4), dtype=torch.int32, device=device)
    counts = torch.empty(3, dtype=torch.int32, device=device)
    adapted = torch.zeros(num_tokens, dtype=torch.int8, device=device)
    largest = MANY_ROWS if has_many(num_tokens) else FEW_ROWS
    _make_tiles[(max(2, ceil_div(num_tokens, largest)),)](
        plan.segment_starts,
        plan.segment_pages,
        plan.segment_ranks,
        plan.rows,
        tiles,
        units,
        counts,
        adapted,
        num_segments,
        MAX_PAGES=num_pages,
        FEW=FEW_ROWS,
        MANY=largest,
        BLOCK=list_block(num_segments),
    )
    # The layers' kernels read the list before they wait for what precedes them. A plain copy in between,
    # which starts only when the list is written, makes that safe.
    return LoraTiles(tiles, units, counts.clone(), adapted)


@kernel(do_not_specialize=["num_segments"])
def _make_tiles(
    segment_starts,
    segment_pages,
    segment_ranks,
    rows_of_segments,
    tiles,
    units,
    counts,
    adapted,
    num_segments,
    MAX_PAGES: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program k writes the k-th tile of every segment."""
    k = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    live = n < num_segments
    start = tl.load(segment_starts + n, live, 0)
    rows = tl.load(segment_starts + n + 1, live, 0) - start
    rank = tl.load(segment_ranks + n, live, 0)
    rows = tl.where(rank > 0, tl.maximum(rows, 0), 0)
    num_pages = (rank + 15) // 16
    has_many = (rows > 2 * FEW) & (MANY > FEW)
    tile_rows = tl.where(has_many, MANY, FEW)
    num_tiles = (rows + tile_rows - 1) // tile_rows
    num_units = num_tiles * num_pages
    num_many = tl.where(has_many, num_tiles, 0)
    num_few = num_tiles - num_many
    first_of_many = tl.cumsum(num_many, 0) - num_many
    first_of_few = tl.sum(num_many, 0) + tl.cumsum(num_few, 0) - num_few
    tile = tl.where(has_many, first_of_many, first_of_few) + k
    unit = tl.cumsum(num_units, 0) - num_units + k * num_pages
    if k == 0:
        tl.store(counts, tl.sum(num_tiles, 0))
        tl.store(counts + 1, tl.sum(num_units, 0))
        tl.store(counts + 2, tl.sum(num_many, 0))
    has = num_tiles > k
    first = start + k * tile_rows
    size = tl.minimum(rows - k * tile_rows, tile_rows)
    i = tl.arange(0, MANY)[None, :]
    row = tl.load(rows_of_segments + first[:, None] + i, has[:, None] & (i < size[:, None]), -1)
    tl.store(adapted + row, 1, row >= 0)
    record = tiles + tile * 5
    tl.store(record, first, has)
    tl.store(record + 1, size, has)
    tl.store(record + 2, n, has)
    tl.store(record + 3, rank, has)
    tl.store(record + 4, tl.load(segment_pages + n * MAX_PAGES, has, 0), has)
    for p in range(MAX_PAGES):
        has_page = has & (num_pages > p)
        page = tl.load(segment_pages + n * MAX_PAGES + p, has_page, 0)
        record = units + (unit + p) * 4
        tl.store(record, first, has_page)
        tl.store(record + 1, size, has_page)
        tl.store(record + 2, page, has_page)
        tl.store(record + 3, p * 16 + tl.minimum(rank - p * 16, 16) - 1, has_page)
