from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from adapters.errors import InvalidAdapter
from adapters.safetensors_header import MAX_TENSORS, read_header
from tests.adapters.files import safetensors, tensors, with_header

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def fault_of(path: Path, content: bytes) -> InvalidAdapter:
    path.write_bytes(content)
    with pytest.raises(InvalidAdapter) as error:
        read_header(path)
    return error.value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "adapter_model.safetensors"


def test_reads_what_the_library_writes(file: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.ones((4,), np.float32)}
    save_file(arrays, file, metadata={"format": "pt"})
    content = file.read_bytes()
    for tensor in read_header(file):
        assert tensor.shape == arrays[tensor.name].shape
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == arrays[tensor.name].tobytes()
    assert {tensor.dtype for tensor in read_header(file)} == {"F16", "F32"}


@pytest.mark.parametrize("length", [0, 7, 8, 40, -1])
def test_truncated(file: Path, length: int) -> None:
    whole = safetensors(tensors())
    assert fault_of(file, whole[:length]).message


def test_header_length_of_a_gigabyte_is_refused_before_it_is_read(file: Path) -> None:
    with file.open("wb") as out:
        out.write(struct.pack("<Q", 2**30) + b"{")
        out.truncate(2**30 + 64)
    tracemalloc.start()
    with pytest.raises(InvalidAdapter, match="header has 1073741824 bytes"):
        read_header(file)
    assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    tracemalloc.stop()


@pytest.mark.parametrize("length", [2**30, 2**63, 2**64 - 1])
def test_header_length_beyond_the_file(file: Path, length: int) -> None:
    assert "truncated" in fault_of(file, struct.pack("<Q", length) + b"{}").message


@pytest.mark.parametrize("count", [MAX_TENSORS + 1, 2 * MAX_TENSORS])
def test_too_many_tensors(file: Path, count: int) -> None:
    entry = b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(entry % i for i in range(count)) + b"}"
    begun = time.process_time()
    assert f"the limit is {MAX_TENSORS}" in fault_of(file, with_header(header)).message
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    "filler", [b"[" * 1000, b'{"a":' * 100_000, b"[[]," * 1_000_000, b'{"a":1,' * 2_000_000]
)
def test_nesting_and_bulk_end_soon(file: Path, filler: bytes) -> None:
    begun = time.process_time()
    assert fault_of(file, with_header(b'{"a":' + filler))
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "no JSON object"),
        (b"{}", "no tensors"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a":1,"a":2}', "key 'a' twice"),
        (b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', "'dtype' twice"),
        (b'{"__metadata__":{"a":1}}', "__metadata__"),
        (b'{"__metadata__":[]}', "__metadata__"),
        (b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_header_that_is_none(file: Path, header: bytes, says: str) -> None:
    assert says in fault_of(file, with_header(header, b"\0" * 8)).message


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (1, "exactly dtype"),
        ({"dtype": "F32", "shape": [2]}, "exactly dtype"),
        (ENTRY | {"more": 1}, "exactly dtype"),
        (ENTRY | {"dtype": "F33"}, "unknown dtype"),
        (ENTRY | {"dtype": ["F32"]}, "unknown dtype"),
        (ENTRY | {"shape": 2}, "shape"),
        (ENTRY | {"shape": [2.0]}, "shape"),
        (ENTRY | {"shape": [True, 2]}, "shape"),
        (ENTRY | {"shape": [-2]}, "shape"),
        (ENTRY | {"shape": [2**60]}, "shape"),
        (ENTRY | {"shape": [1] * 9}, "shape"),
        (ENTRY | {"data_offsets": [0]}, "offsets"),
        (ENTRY | {"data_offsets": [8, 0]}, "offsets"),
        (ENTRY | {"data_offsets": [-8, 0]}, "offsets"),
        (ENTRY | {"data_offsets": [0, 8.0]}, "offsets"),
        (ENTRY | {"data_offsets": [0, 4]}, "span 4"),
        (ENTRY | {"shape": [3]}, "needs 12 bytes"),
    ],
)
def test_entry_that_is_wrong_names_its_tensor(file: Path, entry: Any, says: str) -> None:
    error = fault_of(file, with_header(json.dumps({"the.tensor": entry}).encode(), b"\0" * 8))
    assert says in error.message and "the.tensor" in error.message
    assert error.field_or_tensor == "the.tensor"


@pytest.mark.parametrize(
    ("first", "second", "size", "says"),
    [
        ([0, 8], [0, 8], 8, "overlaps"),
        ([0, 8], [4, 12], 12, "overlaps"),
        ([0, 8], [12, 20], 20, "gap"),
        ([4, 12], [12, 20], 20, "gap"),
        ([0, 8], [8, 16], 12, "truncated"),
        ([0, 8], [8, 16], 20, "4 bytes after its last tensor"),
    ],
)
def test_offsets_tile_the_data(file: Path, first: list[int], second: list[int], size: int, says: str) -> None:
    entries = {"a": ENTRY | {"data_offsets": first}, "b": ENTRY | {"data_offsets": second}}
    assert says in fault_of(file, with_header(json.dumps(entries).encode(), b"\0" * size)).message


def test_messages_of_hostile_names_are_short_and_printable(file: Path) -> None:
    error = fault_of(file, with_header(json.dumps({"\x1b[31m\n" + "x" * 10_000: 1}).encode()))
    assert error.message.isprintable() and len(error.message) < 400
    assert error.field_or_tensor is not None and len(error.field_or_tensor) == 300
    assert "surrogate" in fault_of(file, with_header(rb'{"\ud800": 1}')).message
