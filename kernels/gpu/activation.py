"""SiLU of the gate times up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import ceil_div, dependent_launch, kernel, let_next_start, wait_for_inputs
from kernels.gpu.linear import Addend

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor, addend: Addend | None = None) -> torch.Tensor:
    """See ``kernels.activation.silu_mul``; of the sum with the addend in the rows that it has."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return out
    pdl = dependent_launch(gate_up)
    _silu_mul[(num_rows, ceil_div(size, _BLOCK))](
        gate_up,
        out,
        gate_up if addend is None else addend.values,
        gate_up if addend is None else addend.rows,
        SIZE=size,
        HAS_ADDEND=addend is not None,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


@triton.jit
def gated(gate, up):
    """SiLU of the gate times up, in float32."""
    return gate / (1 + tl.exp(-gate)) * up


@kernel
def _silu_mul(
    gate_up,
    out,
    addend,
    added_rows,
    SIZE: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    if HAS_ADDEND:
        added = mask & (tl.load(added_rows + row) != 0)
    wait_for_inputs(PDL)
    offset = row * 2 * SIZE + column
    gate = tl.load(gate_up + offset, mask, 0.0).to(tl.float32)
    up = tl.load(gate_up + offset + SIZE, mask, 0.0).to(tl.float32)
    if HAS_ADDEND:
        gate += tl.load(addend + offset, added, 0.0)
        up += tl.load(addend + offset + SIZE, added, 0.0)
    tl.store(out + row * SIZE + column, gated(gate, up).to(out.dtype.element_ty), mask)
