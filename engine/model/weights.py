"""Weights of a Hugging Face folder: safetensors, in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.model.errors import ModelNotAvailable


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    def has(self, name: str) -> bool:
        """Whether the tensor is there."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in the file's dtype.

        Raises:
            ModelNotAvailable: it is missing or cannot be read.
        """
        ...


class SafetensorsFolder:
    """The weights of a folder, memory-mapped; a tensor is read when it is asked for.

    Raises:
        ModelNotAvailable: no safetensors file, a shard that the index names is missing, or a damaged file.
    """

    def __init__(self, folder: Path) -> None:
        self.files = weight_files(folder)
        self._folder = folder
        self._owner = {}
        for path in self.files:
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelNotAvailable(f"{path} cannot be read: {error}.") from error
            self._owner.update(dict.fromkeys(handle.keys(), handle))

    def has(self, name: str) -> bool:
        return name in self._owner

    def get(self, name: str) -> torch.Tensor:
        if name not in self._owner:
            raise ModelNotAvailable(f"{self._folder} lacks the tensor {name}.")
        return self._owner[name].get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in name order: those of the index, or the single one.

    Raises:
        ModelNotAvailable: there is none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelNotAvailable(f"{index} is not an index of weight files: {error!r}.") from error
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ModelNotAvailable(f"{folder} holds no .safetensors file; other weight formats are not read.")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelNotAvailable(f"{folder} lacks the weight file {missing[0]}, which its index names.")
    return [folder / name for name in names]
