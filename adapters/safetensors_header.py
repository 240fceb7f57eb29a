"""Reads the header of a safetensors file, with every size bounded before it is read.

Layout: 8 bytes, little-endian: the header's length; the header, a JSON object
of name → dtype, shape and offsets into the data; the data. The offsets must
tile the data exactly, so that no byte is hidden, shared or missing.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.errors import InvalidAdapter, shown
from adapters.strict_json import NotStrictJson, load_object

MAX_HEADER_BYTES = 8 * 1024 * 1024
MAX_TENSORS = 20_000
"""Several times what DoRA on every layer of the largest models has."""
MAX_DIMENSIONS = 8

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `nbytes` bytes from `offset` (counted from the start of the file), row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RawHeader:
    """A header as its file holds it, bounded and not parsed yet, and the file's size in bytes.

    Files whose raw headers are equal differ in nothing but their data.
    """

    text: bytes
    file_size: int


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of a safetensors file, in the order of their data. Reads the header only.

    Raises `InvalidAdapter` that names the fault; OSError when the file cannot be read.
    """
    return parse_header(read_raw_header(path))


def read_raw_header(path: Path) -> RawHeader:
    """The header alone. Raises as `read_header`, for faults of its length."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return RawHeader(_read_raw(file.read(8), size, file.read), size)


def parse_header(header: RawHeader) -> list[TensorInfo]:
    """The tensors that a header tells of, as `read_header`. Raises `InvalidAdapter`."""
    data_start = 8 + len(header.text)
    entries, _ = _entries(header.text)
    tensors = [_tensor(name, entry, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_tiling(tensors, data_start, header.file_size)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """What else the header of a safetensors file says. Raises as `read_header`."""
    return _entries(read_raw_header(path).text)[1]


def _read_raw(length_field: bytes, size: int, read: Any) -> bytes:
    if len(length_field) < 8:
        raise InvalidAdapter(
            f"The weights file has {size} bytes, which is too short for safetensors; upload the whole file."
        )
    (length,) = struct.unpack("<Q", length_field)
    if length > size - 8:
        raise InvalidAdapter(
            f"The weights file announces a header of {length} bytes but has only {size - 8} after it: it is "
            "truncated, or no safetensors file. Save the adapter with safe_serialization=True and upload it "
            "again."
        )
    if length > MAX_HEADER_BYTES:
        raise InvalidAdapter(
            f"The weights file's header has {length} bytes; the limit is {MAX_HEADER_BYTES}. An adapter's "
            "header is far smaller: save it anew with safetensors."
        )
    raw = read(length)
    if len(raw) != length:
        raise InvalidAdapter("The weights file became shorter while it was read; upload it again.")
    return raw


def _entries(raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors' entries, and the metadata."""
    # Counted in the bytes first: parsing millions of entries would cost gigabytes before they could be
    # counted.
    if any(raw.count(mark) > (MAX_TENSORS + 1) * each for mark, each in ((b":", 5), (b"[", 3), (b",", 12))):
        raise InvalidAdapter(
            f"The weights file's header holds too many entries; the limit is {MAX_TENSORS} tensors."
        )
    try:
        entries = load_object(raw)
    except NotStrictJson as error:
        raise InvalidAdapter(
            f"The weights file's header {error}; save the adapter anew with safetensors."
        ) from None
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidAdapter(
            "The weights file's __metadata__ must map names to text; save it anew with safetensors."
        )
    if len(entries) > MAX_TENSORS:
        raise InvalidAdapter(f"The weights file holds {len(entries)} tensors; the limit is {MAX_TENSORS}.")
    if not entries:
        raise InvalidAdapter("The weights file holds no tensors; save the adapter after training it.")
    return entries, metadata


def _tensor(name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(name, "must have exactly dtype, shape and data_offsets in the header")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _bad(name, f"has the unknown dtype {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _bad(
            name, f"has the shape {shown(shape)}, which is not a list of at most {MAX_DIMENSIONS} sizes"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(name, f"has the data offsets {shown(offsets)}, which are not a begin and an end")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise _bad(name, f"needs {nbytes} bytes for its shape but its offsets span {offsets[1] - offsets[0]}")
    return TensorInfo(name, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _check_tiling(tensors: list[TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            fault = "overlaps another's data" if tensor.offset < position else "leaves a gap before its data"
            raise _bad(tensor.name, fault)
        position += tensor.nbytes
    if position > size:
        raise InvalidAdapter(
            f"The weights file is truncated: its tensors end at byte {position}, it has {size}. Upload the "
            "whole file."
        )
    if position < size:
        raise InvalidAdapter(
            f"The weights file has {size - position} bytes after its last tensor, which belong to none; save "
            "it anew with safetensors."
        )


def _bad(name: str, fault: str) -> InvalidAdapter:
    return InvalidAdapter(
        f"The tensor {shown(name)} {fault}; the weights file is damaged: save the adapter anew with "
        "safetensors.",
        name,
    )
