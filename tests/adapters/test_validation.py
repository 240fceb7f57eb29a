from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import weights_scan
from adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from adapters.base_model import MAX_ADDED_TOKENS
from adapters.errors import InvalidAdapter
from adapters.safetensors_header import MAX_HEADER_BYTES
from adapters.standalone import digest_of_folder
from adapters.validation import AdapterSummary, largest_weights_file, validate
from tests.adapters.files import (
    SHAPE,
    Tensors,
    config,
    safetensors,
    tensor_name,
    tensors,
    write_adapter,
)

A0 = tensor_name("q_proj", 0, "A")


def fault_of(folder: Path, **options: Any) -> InvalidAdapter:
    with pytest.raises(InvalidAdapter) as error:
        validate(folder, SHAPE, **options)
    return error.value


def test_a_valid_adapter(tmp_path: Path) -> None:
    summary = validate(write_adapter(tmp_path), SHAPE)
    assert summary == AdapterSummary(
        digest=summary.digest,
        rank=4,
        num_tensors=8,
        nbytes=sum(len(data) for _, _, data in tensors().values()),
        base_model="base/model",
        target_modules=("q_proj", "down_proj"),
    )
    assert len(summary.digest) == 32


def digest(folder: Path, **contents: Any) -> bytes:
    return validate(write_adapter(folder, **contents), SHAPE).digest


SAME: dict[str, dict[str, Any]] = {
    "tensor order": {"weights": dict(sorted(tensors().items(), reverse=True))},
    "infix": {"weights": tensors(infix=".default")},
    "metadata": {"weights": safetensors(tensors(), {"format": "pt"})},
    "key order": {"config_json": json.dumps(dict(reversed(config().items())), indent=3).encode()},
    "no metadata": {"weights": safetensors(tensors(), {})},
    "dropout": {"config_json": config(lora_dropout=0.5, peft_version="0.1")},
    "order of modules": {"config_json": config(target_modules=["down_proj", "q_proj"])},
    "regex": {"config_json": config(target_modules=r".*\.(q|down)_proj")},
    "patterns that say the same": {"config_json": config(r=9, lora_alpha=1, rank_pattern={"proj|.*": 4},
    alpha_pattern={".*": 8})},
    "rslora of the same scale": {"config_json": config(use_rslora=True, lora_alpha=4)},
}  # fmt: skip


@pytest.mark.parametrize("contents", SAME.values(), ids=SAME.keys())
def test_digest_is_of_what_an_adapter_does(tmp_path: Path, contents: dict[str, Any]) -> None:
    assert digest(tmp_path / "a") == digest(tmp_path / "b", **contents)


def flipped(weights: Tensors, name: str) -> Tensors:
    dtype, shape, data = weights[name]
    return weights | {name: (dtype, shape, bytes([data[0] ^ 1]) + data[1:])}


def cast(weights: Tensors, dtype: type[np.float16]) -> Tensors:
    return {
        name: ("F16", shape, np.frombuffer(data, np.float32).astype(dtype).tobytes())
        for name, (_, shape, data) in weights.items()
    }


OTHER: dict[str, dict[str, Any]] = {
    "alpha": {"config_json": config(lora_alpha=9)},
    "alpha of one module": {"config_json": config(alpha_pattern={"down_proj": 9})},
    "rslora": {"config_json": config(use_rslora=True)},
    "one bit": {"weights": flipped(tensors(), A0)},
    "last tensor's bit": {"weights": flipped(tensors(), tensor_name("down_proj", 1, "B"))},
    "dtype": {"weights": cast(tensors(), np.float16)},
    "another module": {
        "weights": tensors("q_proj", "up_proj"),
        "config_json": config(target_modules=["q_proj", "up_proj"]),
    },
    "fewer modules": {"weights": tensors("q_proj"), "config_json": config(target_modules=["q_proj"])},
}


@pytest.mark.parametrize("contents", OTHER.values(), ids=OTHER.keys())
def test_digest_changes_with_what_an_adapter_does(tmp_path: Path, contents: dict[str, Any]) -> None:
    assert digest(tmp_path / "a") != digest(tmp_path / "b", **contents)


WORDS: dict[str, dict[str, Any]] = {
    "base model's name": {"config_json": config(base_model_name_or_path="/home/me/model")},
    "unsloth's mark": {"config_json": config(auto_mapping={"base_model_class": "X", "unsloth_fixed": True})},
    "revision": {"config_json": config(revision="mine")},
    "release": {"config_json": config(peft_version="built by me")},
    "an unknown field that is off": {"config_json": config(my_secret=None)},
    "metadata": {"weights": safetensors(tensors(), {"format": "pt", "run": "mine"})},
}


@pytest.mark.parametrize("contents", WORDS.values(), ids=WORDS.keys())
def test_digest_changes_with_words_that_a_download_would_show(
    tmp_path: Path, contents: dict[str, Any]
) -> None:
    assert digest(tmp_path / "a") != digest(tmp_path / "b", **contents)
    assert digest_of_folder(tmp_path / "b") == digest(tmp_path / "b", **contents)


def test_the_files_of_an_own_tokenizer_count_as_they_are(tmp_path: Path) -> None:
    def digest_with(tokenizer_file: bytes | None, identity: str) -> bytes:
        folder = write_adapter(tmp_path)
        (folder / "tokenizer_config.json").unlink(missing_ok=True)
        if tokenizer_file is not None:
            (folder / "tokenizer_config.json").write_bytes(tokenizer_file)
        return validate(folder, SHAPE, tokenizer=identity).digest

    assert digest_with(b"{}", "ab") != digest_with(b'{"name_or_path": "/home/me"}', "ab")
    assert digest_with(b"{}", "") == digest_with(None, "")


def test_swapping_two_tensors_of_one_shape_changes_the_digest(tmp_path: Path) -> None:
    weights = tensors()
    first, second = tensor_name("q_proj", 0, "A"), tensor_name("q_proj", 1, "A")
    swapped = weights | {first: weights[second], second: weights[first]}
    assert digest(tmp_path / "a") != digest(tmp_path / "b", weights=swapped)


def test_pieces_of_a_tensor_are_read_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = digest(tmp_path / "a")
    last = with_value(A0, "F32", 0x7FC00000, -1)
    monkeypatch.setattr(weights_scan, "_PIECE_BYTES", 48)
    assert digest(tmp_path / "a") == whole
    assert fault_of(write_adapter(tmp_path / "b", weights=last)).field_or_tensor == A0
    begins = {
        name: (dtype, shape, data[:4] + bytes(len(data) - 4))
        for name, (dtype, shape, data) in tensors().items()
    }
    validate(write_adapter(tmp_path / "c", weights=begins), SHAPE)  # not zero, though it ends so


def with_value(name: str, dtype: str, bits: int, at: int) -> Tensors:
    """The weights in a dtype, with one element of a tensor given by its bits."""
    width = 4 if dtype == "F32" else 2
    kind = np.dtype(f"<u{width}")
    result: Tensors = {}
    for key, (_, shape, _) in tensors().items():
        values = np.full(shape, {"F32": 0x3F800000, "F16": 0x3C00, "BF16": 0x3F80}[dtype], kind)
        if key == name:
            values.flat[at] = bits
        result[key] = (dtype, shape, values.tobytes())
    return result


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("F32", 0x7F800000), ("F32", 0xFF800000), ("F32", 0x7FC00000), ("F32", 0xFFFFFFFF), ("F32", 0x7F800001),
     ("F16", 0x7C00), ("F16", 0xFC00), ("F16", 0x7E00), ("BF16", 0x7F80), ("BF16", 0xFF80), ("BF16", 0x7FC0)],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 17, -1])
def test_nan_and_inf_are_refused_by_tensor(tmp_path: Path, dtype: str, bits: int, at: int) -> None:
    name = tensor_name("down_proj", 1, "B")
    error = fault_of(write_adapter(tmp_path, weights=with_value(name, dtype, bits, at)))
    assert error.field_or_tensor == name and "NaN or Inf" in error.message


@pytest.mark.parametrize(
    ("dtype", "bits"), [("F32", 0x7F7FFFFF), ("F16", 0x7BFF), ("BF16", 0x7F7F), ("F16", 1)]
)
def test_the_largest_and_smallest_numbers_are_fine(tmp_path: Path, dtype: str, bits: int) -> None:
    validate(write_adapter(tmp_path, weights=with_value(A0, dtype, bits, 5)), SHAPE)


def zeroed(side: str, *, minus: bool = False) -> Tensors:
    """The weights with one side of every module all zero."""
    zero = struct.pack("<f", -0.0 if minus else 0.0)
    return {
        name: (dtype, shape, zero * (len(data) // 4) if f"lora_{side}" in name else data)
        for name, (dtype, shape, data) in tensors().items()
    }


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("minus", [False, True])
def test_an_update_of_zero_is_refused_unless_allowed(tmp_path: Path, side: str, minus: bool) -> None:
    folder = write_adapter(tmp_path, weights=zeroed(side, minus=minus))
    assert "allow_zero" in fault_of(folder).message
    assert validate(folder, SHAPE, allow_zero=True).num_tensors == 8


def test_an_alpha_of_zero_is_an_update_of_zero(tmp_path: Path) -> None:
    assert "allow_zero" in fault_of(write_adapter(tmp_path, config_json=config(lora_alpha=0))).message


def test_one_module_with_an_effect_is_enough(tmp_path: Path) -> None:
    weights = zeroed("B")
    name = tensor_name("down_proj", 1, "B")
    validate(write_adapter(tmp_path, weights=weights | {name: tensors()[name]}), SHAPE)


def test_sides_of_different_modules_make_no_effect(tmp_path: Path) -> None:
    """A of one module and B of another: each product is still zero."""
    zero = {
        name: (dtype, shape, data if ("q_proj" in name) == ("lora_A" in name) else bytes(len(data)))
        for name, (dtype, shape, data) in tensors().items()
    }
    assert "allow_zero" in fault_of(write_adapter(tmp_path, weights=zero)).message


@pytest.mark.parametrize("name", ["adapter_model.bin", "pytorch_model.bin", "x.pt", "x.pkl"])
def test_a_pickle_is_refused_with_the_mend(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path)
    (folder / WEIGHTS_FILE).rename(folder / name)
    error = fault_of(folder)
    assert error.field_or_tensor == name and "safe_serialization" in error.message


def test_a_pickle_under_the_right_name(tmp_path: Path) -> None:
    assert "safetensors" in fault_of(write_adapter(tmp_path, weights=b"\x80\x02}q\x00(X\x01")).message


@pytest.mark.parametrize(
    "name", ["README.md", "tokenizer_effect.json", "adapter_config.json.bak", "sub", "é\x1b"]
)
def test_other_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path)
    (folder / name).mkdir() if name == "sub" else (folder / name).write_bytes(b"")
    error = fault_of(folder)
    assert error.field_or_tensor == name and error.message.isprintable()


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path)
    (folder / name).unlink()
    assert fault_of(folder).field_or_tensor == name


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize(
    "make", [os.symlink, lambda _, target: os.mkfifo(target), lambda _, target: os.mkdir(target)]
)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, name: str, make: Any) -> None:
    folder = write_adapter(tmp_path / "adapter")
    (folder / name).rename(tmp_path / name)
    make(tmp_path / name, folder / name)
    assert "regular file" in fault_of(folder).message


def test_the_largest_weights_file_is_a_bound(tmp_path: Path) -> None:
    everything = tensors(*SHAPE.modules, rank=SHAPE.max_lora_rank)
    folder = write_adapter(
        tmp_path, config_json=config(r=64, target_modules="all-linear"), weights=everything
    )
    validate(folder, SHAPE)
    data = sum(len(data) for _, _, data in everything.values())
    biases = sum(4 * shape[0] for name, (_, shape, _) in everything.items() if "lora_B" in name)
    without_ends = largest_weights_file(replace(SHAPE, vocab_size=0))
    assert without_ends == data + biases + MAX_HEADER_BYTES + 8
    whole = 4 * (SHAPE.vocab_size + MAX_ADDED_TOKENS) * SHAPE.hidden_size
    assert without_ends + 2 * 4 * whole < largest_weights_file(SHAPE) < without_ends + 2 * 8 * whole
