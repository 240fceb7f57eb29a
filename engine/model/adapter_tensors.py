"""The tensors of an adapter's files, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from adapters.layout import StoredTensor


class AdapterTensors:
    """Reads what a layout names. The files are mapped, so what is not asked for is not read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._handles: dict[str, Any] = {}

    def get(self, tensor: StoredTensor) -> torch.Tensor:
        """The whole tensor on the CPU, in the file's dtype."""
        return self._handle(tensor.file).get_tensor(tensor.name)

    def rows(self, tensor: StoredTensor, start: int, end: int) -> torch.Tensor:
        """Rows ``start`` up to ``end`` of a tensor that may be large."""
        return self._handle(tensor.file).get_slice(tensor.name)[start:end]

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._handles[file]


@contextmanager
def open_adapter(folder: Path) -> Iterator[AdapterTensors]:
    """The tensors of an adapter's folder, while the context lasts."""
    with ExitStack() as stack:
        yield AdapterTensors(folder, stack)
