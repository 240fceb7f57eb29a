"""RMSNorm with the residual's addition fused in; one program a row."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.gpu.launch import dependent_launch, kernel, let_next_start, power_of_2, wait_for_inputs


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``kernels.norm.rms_norm``."""
    num_rows, size = x.shape
    out = torch.empty_like(x)
    if num_rows == 0:
        return out
    block = power_of_2(size)
    pdl = dependent_launch(x)
    _rms_norm[(num_rows,)](
        x,
        weight,
        x if residual is None else residual,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        PDL=pdl,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=pdl,
    )
    return out


@kernel
def _rms_norm(
    x,
    weight,
    residual,
    out,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    gain = tl.load(weight + column, mask, 0.0).to(tl.float32)
    wait_for_inputs(PDL)
    h = tl.load(x + row + column, mask, 0.0)
    if HAS_RESIDUAL:
        stored = tl.load(residual + row + column, mask, 0.0).to(tl.float32) + h.to(tl.float32)
        h = stored.to(h.dtype)
        tl.store(residual + row + column, h, mask)
    wide = h.to(tl.float32)
    mean_square = tl.sum(wide * wide, 0) / SIZE
    tl.store(out + row + column, (wide * tl.rsqrt(mean_square + eps) * gain).to(h.dtype), mask)
