"""Reads an adapter's folder into its layout."""

from __future__ import annotations

from pathlib import Path

from adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from adapters.layout import AdapterLayout, LowRank, StoredTensor
from adapters.peft_config import MAX_CONFIG_BYTES, parse_config
from adapters.peft_format import BaseModelShape, LoraTensor, map_tensors
from adapters.safetensors_header import read_header


def read_layout(folder: Path, shape: BaseModelShape) -> AdapterLayout:
    """Lays the adapter in `folder` against a base model. Reads the config and headers, no weights.

    Raises `InvalidAdapter` that names the fault; OSError when a file cannot be read.
    """
    with (folder / CONFIG_FILE).open("rb") as file:
        config = parse_config(file.read(MAX_CONFIG_BYTES + 1))
    tensors = map_tensors(config, read_header(folder / WEIGHTS_FILE), shape)
    linear = {
        (a.layer, a.module): LowRank(a.rank, a.scale, _stored(a), _stored(b))
        for a, b in zip(tensors[::2], tensors[1::2], strict=True)
    }
    return AdapterLayout(linear=linear, vocab_size=shape.vocab_size)


def _stored(tensor: LoraTensor) -> StoredTensor:
    return StoredTensor(tensor.name, WEIGHTS_FILE, tensor.dtype, tensor.shape, tensor.offset, tensor.nbytes)
