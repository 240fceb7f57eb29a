"""Scaling and shifting the outputs of rows whose adapter has vectors."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.gpu.launch import ceil_div, dependent_launch, kernel, let_next_start, wait_for_inputs
from kernels.plans import GAIN_ROW, RANK_PAGE, SHIFT_ROW, LoraPool, RowVectors

_BLOCK = 1024


def apply_vectors(y: torch.Tensor, pool: LoraPool, vectors: RowVectors) -> None:
    """See ``kernels.lora.apply_vectors``."""
    num_rows, out = vectors.rows.shape[0], y.shape[1]
    if num_rows == 0:
        return
    pdl = dependent_launch(y)
    _scale_and_shift[(num_rows, ceil_div(out, _BLOCK))](
        y,
        pool.b,
        vectors.rows,
        vectors.pages,
        OUT=out,
        PAGE=RANK_PAGE,
        GAIN=GAIN_ROW,
        SHIFT=SHIFT_ROW,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@kernel
def _scale_and_shift(
    y,
    b,
    rows,
    pages,
    OUT: tl.constexpr,
    PAGE: tl.constexpr,
    GAIN: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    item = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < OUT
    page = b + tl.load(pages + item) * PAGE * OUT + column
    gain = tl.load(page + GAIN * OUT, mask, 0.0).to(tl.float32)
    shift = tl.load(page + SHIFT * OUT, mask, 0.0).to(tl.float32)
    target = y + tl.load(rows + item) * OUT + column
    wait_for_inputs(PDL)
    stored = tl.load(target, mask, 0.0)
    x = stored.to(tl.float32)
    tl.store(target, (x + (x * gain + shift)).to(stored.dtype), mask)
