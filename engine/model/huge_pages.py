"""Host memory that is read from end to end, in pages of 2 MiB.

A processor looks each page up before it reads there, on a virtual machine twice: with pages of 4 KiB one core
read 24 GB/s here, with huge ones 47. Memory new from the system costs a fault a page as well, half a
microsecond for 4 KiB, which for an adapter's ten megabytes is longer than laying it out.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

_HUGE = 2 << 20
"""Bytes. Where they are larger, little is lost: the advice is then ignored for what is smaller."""


def zeros(nbytes: int) -> torch.Tensor:
    """Zero bytes on the CPU, uint8 [nbytes]; nothing of them takes memory before it is written or read.

    Given back to the system when the last tensor on them goes.
    """
    if nbytes < _HUGE:
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
