"""Copies of matrices from an adapter's files into the layout of rank pages, on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from kernels import native

SOURCE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What files hold, in the order by which `MatrixCopy.dtype` numbers them."""


@dataclass(frozen=True, slots=True)
class MatrixCopy:
    """One matrix [ranks, columns] of a file, and where it goes in the target.

    Steps and ``target`` count elements.

    Attributes:
        file: index into the sources.
        offset: in bytes, of the first element; of any alignment.
        dtype: index into `SOURCE_DTYPES`.
        rank_step, column_step: between neighbours in the source; one of them is 1.
        target: of the first element. target_step: from rank to rank; columns lie side by side.
    """

    file: int
    offset: int
    dtype: int
    ranks: int
    columns: int
    rank_step: int
    column_step: int
    target: int
    target_step: int


def copies_array(copies: Sequence[MatrixCopy]) -> np.ndarray:
    """The copies as `pack` takes them: int64 [N, fields], in the order of the fields."""
    names = [field.name for field in fields(MatrixCopy)]
    rows = [[getattr(copy, name) for name in names] for copy in copies]
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(names))


TARGET_FIELD = [field.name for field in fields(MatrixCopy)].index("target")
"""The column of `copies_array` that says where a copy goes."""


def prepare(dtype: torch.dtype) -> None:
    """Have `pack` to this dtype compiled now, which may take seconds, and not by the first call of it."""
    native.compiled(dtype)


def pack(
    sources: Sequence[torch.Tensor], copies: np.ndarray, target: torch.Tensor, *, num_threads: int = 1
) -> None:
    """Write the copies into ``target``, converted to its dtype. Nothing else of it is touched.

    Where there are compiled kernels, the interpreter's lock is free meanwhile.

    Args:
        sources: uint8, on the CPU: the files' bytes.
        copies: of `copies_array`; all within the sources and the target.
        target: contiguous, on the CPU.
        num_threads: with one, no thread is used but the caller's.
    """
    kernels = native.compiled(target.dtype)
    if kernels is None:
        for row in copies.tolist():
            _copy_matrix(sources, MatrixCopy(*row), target)
        return
    files = (ctypes.c_void_p * len(sources))(*(source.data_ptr() for source in sources))
    kernels.pack(files, copies.ctypes.data, len(copies), target.data_ptr(), num_threads)


def _copy_matrix(sources: Sequence[torch.Tensor], copy: MatrixCopy, target: torch.Tensor) -> None:
    """One copy in plain torch."""
    dtype = SOURCE_DTYPES[copy.dtype]
    shape, steps = (copy.ranks, copy.columns), (copy.rank_step, copy.column_step)
    span = sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) + 1
    source = sources[copy.file][copy.offset : copy.offset + span * dtype.itemsize]
    matrix = source.clone().view(dtype).as_strided(shape, steps)  # a clone is aligned
    target.view(-1).as_strided(shape, (copy.target_step, 1), copy.target).copy_(matrix)
