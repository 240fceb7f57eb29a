"""Uploads made to hurt: refused for what they are, soon, and in little memory.

Each runs in a process of its own, whose peak tells what the refusal took.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.adapter_files import CONFIG_FILE, INDEX_FILE, MAX_SHARDS, WEIGHTS_FILE
from adapters.base_model import BaseModelShape
from adapters.errors import InvalidAdapter
from adapters.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS
from adapters.validation import validate
from tests.adapters.files import SHAPE, config, tensor_name, with_header, write_adapter

MAX_MEMORY = 64 * 1024 * 1024
MAX_SECONDS = 20.0  # on a loaded machine; each takes a fraction of it on an idle one

WIDE = BaseModelShape(num_layers=8, modules={"q_proj": (65_536, 65_536)}, max_lora_rank=128)
"""A base model for which half a gigabyte is an adapter's right size."""


def tensors_of(count: int) -> bytes:
    entry = (
        b'"base_model.model.model.layers.%d.self_attn.q_proj.lora_A.weight":'
        b'{"dtype":"F16","shape":[1],"data_offsets":[%d,%d]}'
    )
    entries = b",".join(entry % (i, 2 * i, 2 * i + 2) for i in range(count))
    return with_header(b"{" + entries + b"}", bytes(2 * count))


def header_bomb(pattern: bytes) -> bytes:
    return with_header((pattern * (MAX_HEADER_BYTES // len(pattern) + 1))[:MAX_HEADER_BYTES])


WEIGHTS: dict[str, Callable[[], bytes]] = {
    "a header of exabytes": lambda: struct.pack("<Q", 2**63 - 1) + b"{" + bytes(100),
    "a header longer than the file": lambda: struct.pack("<Q", 10**6) + b"{}",
    "a header of nested lists": lambda: header_bomb(b"["),
    "a header of nested objects": lambda: header_bomb(b'{"a":'),
    "a header of many small values": lambda: with_header(
        b"{" + b",".join(b'"%x":[[]]' % i for i in range(MAX_HEADER_BYTES // 13)) + b"}"
    ),
    "a header of one long name": lambda: header_bomb(b'{"' + b"x" * (MAX_HEADER_BYTES // 2)),
    "a header of escapes": lambda: with_header(b'{"' + rb"\ud83d" * (MAX_HEADER_BYTES // 6 - 2) + b'":1}'),
    "a header of digits": lambda: with_header(b'{"a":' + b"9" * (MAX_HEADER_BYTES - 100) + b"}"),
    "200,000 tensors": lambda: tensors_of(200_000),
    "as many tensors as are read": lambda: tensors_of(MAX_TENSORS),
    "a name of megabytes": lambda: with_header(
        json.dumps({"base_model.model." + "lora_A." * 1_000_000: {
            "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(), bytes(4)
    ),
    "a shape of 2**96 elements": lambda: with_header(
        json.dumps({"a": {"dtype": "F32", "shape": [2**32] * 3, "data_offsets": [0, 4]}}).encode(), bytes(4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights_made_to_hurt(tmp_path: Path, make: Callable[[], bytes]) -> None:
    folder = write_adapter(tmp_path, weights=make())
    assert refusal_of(folder, SHAPE)


CONFIGS: dict[str, bytes | dict[str, Any]] = {
    "nested": b"[" * 1_000_000,
    "many patterns that are dear": config(rank_pattern={f"(?:.?){{200}}x{i}": 2 for i in range(4000)}),
    "a pattern that backtracks": config(target_modules=r"(.*.*)*(.*.*)*x(.*.*)*"),
    "half a million targets": config(target_modules=["a"] * 200_000),
    "a hundred thousand trained tokens": config(trainable_token_indices=list(range(100_000))),
    "an integer of a megabyte": b'{"peft_type":"LORA","r":' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("raw", CONFIGS.values(), ids=CONFIGS.keys())
def test_configs_made_to_hurt(tmp_path: Path, raw: bytes | dict[str, Any]) -> None:
    assert refusal_of(write_adapter(tmp_path, config_json=raw), SHAPE)


def sparse(folder: Path, *, nbytes: int, head: bytes) -> Path:
    """A weights file of which only the header takes room on the disk."""
    write_adapter(folder, config_json=config(r=128, target_modules=["q_proj"]), weights=head)
    os.truncate(folder / WEIGHTS_FILE, nbytes)
    stored = os.stat(folder / WEIGHTS_FILE).st_blocks * 512
    assert stored * 1000 < nbytes
    return folder


def wide_header(rank: int) -> tuple[bytes, int]:
    header, position = {}, 0
    for layer in range(WIDE.num_layers):
        for side, sizes in (("A", [rank, 65_536]), ("B", [65_536, rank])):
            end = position + 4 * sizes[0] * sizes[1]
            entry = {"dtype": "F32", "shape": sizes, "data_offsets": [position, end]}
            header[tensor_name("q_proj", layer, side)] = entry
            position = end
    head = with_header(json.dumps(header).encode())
    return head, len(head) + position


def test_a_sparse_file_that_fits_is_read_and_found_to_be_zero(tmp_path: Path) -> None:
    head, nbytes = wide_header(rank=128)
    assert nbytes > 512 * 1024 * 1024
    assert "allow_zero" in refusal_of(sparse(tmp_path, nbytes=nbytes, head=head), WIDE)


def test_a_sparse_file_that_does_not_fit_is_not_read(tmp_path: Path) -> None:
    head, nbytes = wide_header(rank=64)
    folder = sparse(tmp_path / "rank", nbytes=nbytes, head=head)
    assert "rank 128 in the config" in refusal_of(folder, WIDE, seconds=5)
    folder = sparse(tmp_path / "size", nbytes=2**40, head=head)
    assert "the limit is" in refusal_of(folder, WIDE, seconds=5)


def test_links_and_paths_are_not_followed(tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside")
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        folder = write_adapter(tmp_path / f"link to {file}")
        (folder / file).unlink()
        (folder / file).symlink_to(outside / file)
        assert f"{file} is not a regular file" in refusal_of(folder, SHAPE)
    folder = write_adapter(tmp_path / "shards")
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model-00001-of-00001.safetensors")
    mapping = {tensor_name("q_proj", 0, "A"): "../outside/adapter_model.safetensors"}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": mapping}))
    assert INDEX_FILE in refusal_of(folder, SHAPE)


def test_shards_full_of_headers(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    (folder / WEIGHTS_FILE).unlink()
    each = MAX_TENSORS * 3 // 4
    entry = b'"%d.@":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(entry % i for i in range(each)) + b"}"
    for i in range(1, MAX_SHARDS + 1):
        file = folder / f"adapter_model-{i:05d}-of-{MAX_SHARDS:05d}.safetensors"
        file.write_bytes(with_header(header.replace(b"@", b"%d" % i)))
    (folder / INDEX_FILE).write_bytes(b"{}")
    assert "more than" in refusal_of(folder, SHAPE)


def refusal_of(folder: Path, shape: BaseModelShape, *, seconds: float = MAX_SECONDS) -> str:
    """The message that an adapter is refused with; fails if that takes too long or too much memory."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_refuse, args=(folder, shape, sender))
    child.start()
    sender.close()
    try:
        assert receiver.poll(120), "the child neither refused nor failed"
        message, elapsed, memory = receiver.recv()
    finally:
        child.join(10)
        child.kill()
    assert elapsed < seconds and memory < MAX_MEMORY, (message, elapsed, memory)
    assert message is not None and message.isprintable() and len(message) < 1200
    return message


def _refuse(folder: Path, shape: BaseModelShape, sender: Any) -> None:
    import numpy as np

    np.zeros(1)  # loaded before the measuring starts
    before = _peak_bytes()
    begun = time.process_time()
    message = None
    try:
        validate(folder, shape)
    except InvalidAdapter as error:
        message = error.message
    elapsed = time.process_time() - begun
    sender.send((message, elapsed, _peak_bytes() - before))


def _peak_bytes() -> int:
    """The most memory that this process has had. (`getrusage` counts its parent's in.)"""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
