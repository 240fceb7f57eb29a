"""The tensors of an adapter's files, read one at a time."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch

from adapters.layout import StoredTensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class AdapterTensors:
    """Reads what a layout names. The files are mapped, so what is not asked for is not read.

    An adapter has hundreds of small tensors: each is a view of the mapping, which costs a tenth of what
    safetensors' own reader takes. They must be copied, and not written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, mmap.mmap] = {}

    def get(self, tensor: StoredTensor) -> torch.Tensor:
        """The whole tensor on the CPU, in the file's dtype."""
        dtype = _DTYPES[tensor.dtype]
        buffer, offset = self._mapped(tensor.file), tensor.offset
        if offset % dtype.itemsize:  # a header of any length is valid, though no writer makes such
            buffer, offset = bytearray(buffer[offset : offset + tensor.nbytes]), 0
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(tensor.shape), offset=offset)
        return flat.view(tensor.shape)

    def rows(self, tensor: StoredTensor, start: int, end: int) -> torch.Tensor:
        """Rows ``start`` up to ``end`` of a tensor that may be large."""
        return self.get(tensor)[start:end]

    def file(self, name: str) -> torch.Tensor:
        """All bytes of a file of weights, uint8."""
        return torch.frombuffer(self._mapped(name), dtype=torch.uint8)

    def _mapped(self, file: str) -> mmap.mmap:
        if file not in self._files:
            with (self._folder / file).open("rb") as handle:
                # Private and writable, which is what torch wants of a buffer; nothing is written.
                self._files[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._files[file]
