"""Arrays on their way between the host and the device, without either waiting for the other.

A copy to a GPU is asynchronous only from page-locked memory. torch keeps such memory in a cache of its own,
and gives a block out again only when the copies from it have been made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

ALIGNMENT = 16
"""Bytes. Kernels are compiled for addresses of this alignment, wherever a step's tensors lie."""

_MOST_BYTES = 8 << 20
"""What a grammar's bits of 256 rows take, and nothing else of a step comes near."""
_LARGE_BYTES = 64 << 10
_BLOCKS, _LARGE_BLOCKS = 32, 4
"""Of one size. Up to three steps have copies under way, each of some eight arrays of a few bytes a row."""


def lock_host_memory(device: torch.device) -> None:
    """Has torch page-lock blocks of every size that a step's arrays may have, and keep them.

    To be called when all graphs are captured, since torch gives back what it keeps at the start of a capture.
    To lock memory while the device works may hold the host up for ten milliseconds, and so may the first step
    of one more row. torch rounds sizes up to powers of two, hence some blocks of each are enough.
    """
    if device.type != "cuda":
        return
    held: list[torch.Tensor] = []
    for size in (1 << power for power in range(_MOST_BYTES.bit_length())):
        count = _BLOCKS if size <= _LARGE_BYTES else _LARGE_BLOCKS
        held += [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array as a tensor on the device; on a CPU they share memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def pack_to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Several arrays as tensors on the device, by one copy; on a CPU they share memory with the arrays."""
    if device.type != "cuda":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    layout = PackedLayout({name: (array.shape, array.dtype) for name, array in arrays.items()})
    host = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True)
    for name, part in layout.arrays(host).items():
        part[...] = arrays[name]
    return layout.tensors(host.to(device, non_blocking=True))


class PackedLayout:
    """Where named arrays lie in one buffer.

    Args:
        fields: shape and dtype of each.
    """

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
        self._fields = fields
        self._bounds: dict[str, tuple[int, int]] = {}
        self.nbytes = 0
        for name, (shape, dtype) in fields.items():
            size = math.prod(shape) * dtype.itemsize
            self._bounds[name] = (self.nbytes, self.nbytes + size)
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def arrays(self, buffer: torch.Tensor) -> dict[str, np.ndarray]:
        """The parts of a uint8 buffer in host memory, sharing it."""
        whole = buffer.numpy()
        return {
            name: whole[slice(*self._bounds[name])].view(dtype).reshape(shape)
            for name, (shape, dtype) in self._fields.items()
        }

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a uint8 buffer, sharing it."""
        return {
            name: buffer[slice(*self._bounds[name])].view(getattr(torch, dtype.name)).view(shape)
            for name, (shape, dtype) in self._fields.items()
        }


class Readback:
    """Brings results to the host on a stream of its own, behind the work that makes them.

    On a CPU there is nothing to bring.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensors: Sequence[torch.Tensor]) -> PendingCopies:
        """Copies what the current stream will have computed when it gets here."""
        if self._stream is None:
            return PendingCopies(tensors, tensors, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            done = torch.cuda.Event(blocking=True)
            done.record()
        return PendingCopies(tensors, copies, done)


class PendingCopies:
    """Copies under way. Keeps what is copied alive: its memory must not be given out before."""

    def __init__(
        self, sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], done: torch.cuda.Event | None
    ) -> None:
        self._sources = sources
        self._copies = copies
        self._done = done

    def wait(self) -> Sequence[torch.Tensor]:
        """The copies in host memory, once they are made. Waits without the interpreter's lock."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies
