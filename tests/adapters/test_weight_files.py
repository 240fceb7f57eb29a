"""Weights in one file or in shards: the same adapter, or the fault by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters.adapter_files import (
    INDEX_FILE,
    MAX_SHARDS,
    WEIGHTS_FILE,
    is_adapter_file,
    is_weights,
)
from adapters.errors import InvalidAdapter
from adapters.validation import validate
from adapters.weight_files import read_tensors
from tests.adapters.files import SHAPE, Tensors, safetensors, tensors, write_adapter


def shard(number: int, count: int) -> str:
    return f"adapter_model-{number:05d}-of-{count:05d}.safetensors"


def split(weights: Tensors, count: int) -> dict[str, Tensors]:
    return {
        shard(i + 1, count): {name: weights[name] for name in list(weights)[i::count]} for i in range(count)
    }


def write_shards(folder: Path, shards: dict[str, Tensors], index: object = None) -> Path:
    write_adapter(folder)
    (folder / WEIGHTS_FILE).unlink()
    for file, weights in shards.items():
        (folder / file).write_bytes(safetensors(weights))
    mapping = {name: file for file, weights in shards.items() for name in weights}
    told = {"metadata": {"total_size": 1}, "weight_map": mapping} if index is None else index
    (folder / INDEX_FILE).write_text(json.dumps(told))
    return folder


def fault_of(folder: Path) -> InvalidAdapter:
    with pytest.raises(InvalidAdapter) as error:
        validate(folder, SHAPE)
    return error.value


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_are_the_same_adapter_as_one_file(tmp_path: Path, count: int) -> None:
    whole = validate(write_adapter(tmp_path / "whole"), SHAPE)
    assert validate(write_shards(tmp_path / "shards", split(tensors(), count)), SHAPE) == whole
    files = {tensor.file for tensor in read_tensors(tmp_path / "shards")}
    assert files == {shard(i + 1, count) for i in range(count)}


def test_a_set_that_is_not_whole(tmp_path: Path) -> None:
    shards = split(tensors(), 3)
    folder = write_shards(tmp_path / "lost", shards)
    (folder / shard(2, 3)).unlink()
    assert fault_of(folder).field_or_tensor == shard(2, 3)
    folder = write_shards(tmp_path / "unlisted", shards)
    (folder / INDEX_FILE).unlink()
    assert fault_of(folder).field_or_tensor == INDEX_FILE
    folder = write_shards(tmp_path / "counts", {**shards, shard(2, 2): {}})
    assert fault_of(folder).field_or_tensor == shard(2, 2)
    folder = write_shards(tmp_path / "both", shards)
    (folder / WEIGHTS_FILE).write_bytes(safetensors(tensors()))
    assert fault_of(folder).field_or_tensor == WEIGHTS_FILE
    folder = write_adapter(tmp_path / "index alone")
    (folder / INDEX_FILE).write_text("{}")
    assert fault_of(folder).field_or_tensor == INDEX_FILE


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": None}, {"weight_map": {}}, {"weight_map": {"x": "../../etc/passwd"}}, [], "x"],
)
def test_an_index_that_does_not_say_what_the_shards_hold(tmp_path: Path, index: object) -> None:
    assert fault_of(write_shards(tmp_path, split(tensors(), 2), index)).field_or_tensor == INDEX_FILE


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    shards = split(tensors(), 2)
    names = {name: shard(1, 2) for weights in shards.values() for name in weights}
    assert fault_of(write_shards(tmp_path, shards, {"weight_map": names})).field_or_tensor == INDEX_FILE


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    shards = split(tensors(), 2)
    twice = next(iter(shards[shard(1, 2)]))
    shards[shard(2, 2)][twice] = shards[shard(1, 2)][twice]
    error = fault_of(write_shards(tmp_path, shards))
    assert error.field_or_tensor == twice and "two shards" in error.message


def test_names_of_files() -> None:
    assert is_weights(shard(1, 1)) and is_weights(shard(MAX_SHARDS, MAX_SHARDS))
    for name in (shard(2, 1), shard(0, 1), shard(1, MAX_SHARDS + 1), "adapter_model-1-of-1.safetensors", "x"):
        assert not is_weights(name) and not is_adapter_file(name)
    for name in (
        "../adapter_config.json",
        "adapter_config.json ",
        f"{WEIGHTS_FILE}/x",
        "tokenizer_effect.json",
    ):
        assert not is_adapter_file(name)
