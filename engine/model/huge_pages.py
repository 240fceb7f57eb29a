"""Host memory that is read from end to end, in pages of 2 MiB.

A processor looks each page up before it reads there, on a virtual machine twice: with pages of 4 KiB one core
read 24 GB/s here, with huge ones 47. Memory new from the system is dear as well: an adapter's ten megabytes
cost 2 to 27 ms, most where the system must ask its own host for them; laying the adapter out costs three.
So a few pieces that were given back are kept for who comes next; to zero one takes 0.4 ms.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch

_HUGE = 2 << 20
"""Bytes. Where they are larger, little is lost: the advice is then ignored for what is smaller."""
_MOST_SPARE = 8
"""More than a tenant's loads under way: each needs a piece before its copy pushes another's out."""
_MOST_SPARE_BYTES = 256 << 20
"""No budget counts them, so they are few."""
_spare: deque[mmap.mmap] = deque()
"""Given back, and not zero; the oldest goes to the system when there are more."""


def taken_for(nbytes: int) -> int:
    """Bytes of memory that `zeros` takes for so many."""
    return nbytes if nbytes < _HUGE else -(-nbytes // _HUGE) * _HUGE


def zeros(nbytes: int) -> torch.Tensor:
    """Zero bytes on the CPU, uint8 [nbytes]. New ones take no memory before they are written or read.

    May be called in any thread. Given back when the last tensor on them goes.
    """
    return torch.zeros(nbytes, dtype=torch.uint8) if nbytes < _HUGE else _piece(nbytes, zero=True)


def empty(nbytes: int) -> torch.Tensor:
    """Like `zeros`, but of any content."""
    return torch.empty(nbytes, dtype=torch.uint8) if nbytes < _HUGE else _piece(nbytes, zero=False)


def _piece(nbytes: int, *, zero: bool) -> torch.Tensor:
    memory = _spare_piece(taken_for(nbytes), zero=zero) or _new_piece(taken_for(nbytes))
    piece = np.frombuffer(memory, dtype=np.uint8)
    weakref.finalize(piece, _give_back, memory).atexit = False
    return torch.from_numpy(piece)[:nbytes]


def _spare_piece(nbytes: int, *, zero: bool) -> mmap.mmap | None:
    """One of this size that was given back; ``zero`` again, if it is to be."""
    for _ in range(len(_spare)):
        try:
            memory = _spare.popleft()
        except IndexError:  # another thread was faster
            return None
        if len(memory) == nbytes:
            if zero:
                # Not torch's zero_: its threads, started from this one, would wait beside those of the steps.
                ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, nbytes)
            return memory
        _spare.append(memory)
    return None


def _give_back(memory: mmap.mmap) -> None:
    _spare.append(memory)
    with suppress(IndexError):  # another thread was faster
        while len(_spare) > _MOST_SPARE or sum(map(len, tuple(_spare))) > _MOST_SPARE_BYTES:
            _spare.popleft()


def _new_piece(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
