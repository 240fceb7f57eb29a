"""Products of a few rows with a weight, which are bound by the weight's way from memory.

Here 64 rows of the weight are the left side of the matrix instruction, and the step's rows are its columns.
cuBLAS starts a product when the kernel before has ended, and so leaves the memory idle in between; these are
launched dependently, and many small programs keep more of the weight on its way. Where the weight has too few
rows to occupy the device it is cut along ``in`` too, and a second kernel sums the parts, in their order.

What a program keeps on its way is in its processor's shared memory. With more than 16 rows the programs leave
none for others, so a product that adapters run beside takes less, and some longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from kernels.gpu.launch import ceil_div, dependent_launch, kernel, let_next_start, power_of_2, wait_for_inputs

MAX_ROWS = 32
"""Beyond it the rows' own way from the cache binds, and cuBLAS, whose programs share them, is faster."""

_FEWEST_ROWS = 16
"""What the matrix instruction has columns for at least."""
_BLOCK_N = 64
_BLOCK_K = 128
_PROGRAMS = 256
_MAX_SPLITS = 4
_JOIN_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Addend:
    """What the kernel behind a product adds to some of its rows, in passing.

    Attributes:
        values: float32 [T, out]; only the rows in question hold any.
        rows: int8 [T]. Not 0 for them. Written long before: it is read without waiting.
    """

    values: torch.Tensor
    rows: torch.Tensor


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``linear`` is the faster one for these, and can compute them."""
    return (
        0 < x.shape[0] <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype
        and weight.shape[0] % _BLOCK_N == 0
        and weight.shape[1] % _BLOCK_K == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and dependent_launch(x)
    )


def linear(x: torch.Tensor, weight: torch.Tensor, *, leaves_room: bool = False) -> torch.Tensor:
    """``x Wᵀ``, [T, in] → [T, out], for what ``fits``; sums are in float32. See ``parts_of``."""
    if num_parts(x, weight) > 1:
        return join(parts_of(x, weight, leaves_room=leaves_room), x.dtype)
    y = torch.empty((1, x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch_product(x, weight, y, leaves_room)
    return y[0]


def num_parts(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Into how many the product is cut along ``in``."""
    wanted = power_of_2(ceil_div(_PROGRAMS, weight.shape[0] // _BLOCK_N))
    return min(_MAX_SPLITS, wanted, x.shape[1] // _BLOCK_K)


def parts_of(x: torch.Tensor, weight: torch.Tensor, *, leaves_room: bool = False) -> torch.Tensor:
    """float32 [parts, T, out], which sum up to the product.

    Args:
        leaves_room: for kernels that run beside, at some cost.
    """
    shape = (num_parts(x, weight), x.shape[0], weight.shape[0])
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch_product(x, weight, parts, leaves_room)
    return parts


def join(parts: torch.Tensor, dtype: torch.dtype, addend: Addend | None = None) -> torch.Tensor:
    """The sum of the parts, and of the addend where it has rows, in ``dtype``."""
    splits, num_rows, out = parts.shape
    pdl = dependent_launch(parts)
    y = torch.empty((num_rows, out), dtype=dtype, device=parts.device)
    _join[(num_rows, ceil_div(out, _JOIN_BLOCK))](
        parts,
        y,
        parts if addend is None else addend.values,
        parts if addend is None else addend.rows,
        OUT=out,
        SPLITS=splits,
        HAS_ADDEND=addend is not None,
        BLOCK=_JOIN_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return y


def _launch_product(x: torch.Tensor, weight: torch.Tensor, parts: torch.Tensor, leaves_room: bool) -> None:
    splits, num_rows, out = parts.shape
    tiles = out // _BLOCK_N
    block_k, num_stages = _chunks(tiles * splits, splits, leaves_room and num_rows > _FEWEST_ROWS)
    pdl = dependent_launch(x)
    _product[(tiles * splits,)](
        x,
        weight,
        parts,
        num_rows,
        OUT=out,
        SIZE=x.shape[1],
        ROWS=max(_FEWEST_ROWS, power_of_2(num_rows)),
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k,
        SPLITS=splits,
        NUM_STAGES=num_stages,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _chunks(programs: int, splits: int, leaves_room: bool) -> tuple[int, int]:
    """(columns of a chunk, chunks on their way) of a program."""
    if leaves_room:
        return (_BLOCK_K, 3) if programs <= _PROGRAMS else (_BLOCK_K // 2, 4)
    # Three programs fit where there are more than two for each processor.
    return _BLOCK_K, 3 if splits > 1 and programs > _PROGRAMS else 4


@kernel(do_not_specialize=["num_rows"])
def _product(
    x,
    weight,
    parts,
    num_rows,
    OUT: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N rows of the weight, one split of ``in``; SPLITS results of [rows, OUT]."""
    let_next_start(PDL)
    split = tl.program_id(0) % SPLITS
    n = tl.program_id(0) // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    chunks: tl.constexpr = SIZE // BLOCK_K
    start = chunks * split // SPLITS * BLOCK_K
    end = chunks * (split + 1) // SPLITS * BLOCK_K
    own = weight + n.to(tl.int64)[:, None] * SIZE + k[None, :]
    rows = x + m[None, :] * SIZE + k[:, None]
    mask = (m < num_rows)[None, :]
    wait_for_inputs(PDL)
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for chunk in tl.range(start, end, BLOCK_K, num_stages=NUM_STAGES):
        acc = tl.dot(tl.load(own + chunk), tl.load(rows + chunk, mask, 0.0), acc)
    target = parts + split.to(tl.int64) * num_rows * OUT + m[None, :] * OUT + n[:, None]
    tl.store(target, acc.to(parts.dtype.element_ty), mask)


@kernel
def _join(
    parts,
    y,
    addend,
    added_rows,
    OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < OUT
    if HAS_ADDEND:
        added = tl.load(added_rows + row) != 0
    wait_for_inputs(PDL)
    pointers = parts + row * OUT + n
    total = tl.load(pointers, mask, 0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointers + split * tl.num_programs(0) * OUT, mask, 0.0)
    if HAS_ADDEND:
        total += tl.load(addend + row * OUT + n, mask & added, 0.0)
    tl.store(y + row * OUT + n, total.to(y.dtype.element_ty), mask)
