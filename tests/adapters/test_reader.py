"""Every tensor has a place and every place its tensors, or the adapter is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapters.adapter_files import WEIGHTS_FILE
from adapters.base_model import BaseModelShape
from adapters.errors import InvalidAdapter
from adapters.layout import AdapterLayout
from adapters.reader import read_layout
from tests.adapters.files import (
    RANK,
    SHAPE,
    Tensors,
    config,
    tensor_name,
    tensors,
    write_adapter,
)


def read(folder: Path) -> AdapterLayout:
    return read_layout(folder, SHAPE)


def test_every_tensor_is_found_with_its_bytes(tmp_path: Path) -> None:
    weights = dict(reversed(tensors().items()))
    layout = read(write_adapter(tmp_path, weights=weights))
    assert list(layout.linear) == [(0, "q_proj"), (0, "down_proj"), (1, "q_proj"), (1, "down_proj")]
    content = (tmp_path / WEIGHTS_FILE).read_bytes()
    for (layer, module), update in layout.linear.items():
        for side, tensor in (("A", update.a), ("B", update.b)):
            assert tensor.name == tensor_name(module, layer, side)
            assert content[tensor.offset : tensor.offset + tensor.nbytes] == weights[tensor.name][2]
    assert [part.name for part in layout.parts] == sorted(
        f"layers.{layer}.{module}.{side}" for layer, module in layout.linear for side in "AB"
    )
    assert layout.settings == {} and not layout.has_ends and not layout.has_vectors


def test_the_adapter_name_infix_changes_nothing(tmp_path: Path) -> None:
    plain = read(write_adapter(tmp_path / "plain"))
    for infix in (".default", ".my-adapter"):
        written = read(write_adapter(tmp_path / infix, weights=tensors(infix=infix)))
        assert [(part.name, part.scale) for part in written.parts] == [
            (part.name, part.scale) for part in plain.parts
        ]


def fault_of(folder: Path, weights: Tensors, **changes: Any) -> InvalidAdapter:
    write_adapter(folder, config_json=config(**changes), weights=weights)
    with pytest.raises(InvalidAdapter) as error:
        read(folder)
    return error.value


@pytest.mark.parametrize(
    "name",
    [
        "q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.-1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.a.b.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias",
        "base_model.model.model.layers.0.input_layernorm.weight",
        "base_model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model._orig_mod.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A.weight",
        "base_model.model.lm_head.lora_embedding_A",
        "base_model.model.lm_head.score.weight",
        "base_model.model.vision_tower.patch_embed.weight",
        "../../etc/passwd",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight\n",
        "ｂase_model",
        "",
    ],
)
def test_a_tensor_without_a_place_is_named(tmp_path: Path, name: str) -> None:
    error = fault_of(tmp_path, {**tensors(), name: ("F32", [2, 2], b"\0" * 16)})
    assert error.field_or_tensor == name


@pytest.mark.parametrize("side", ["A", "B"])
def test_one_side_alone(tmp_path: Path, side: str) -> None:
    weights = tensors()
    missing = tensor_name("down_proj", 1, side)
    del weights[missing]
    error = fault_of(tmp_path, weights)
    assert error.field_or_tensor == missing and missing in error.message


def test_a_targeted_module_without_tensors(tmp_path: Path) -> None:
    error = fault_of(tmp_path, tensors(), target_modules=["q_proj", "down_proj", "o_proj"])
    assert "layers.0.self_attn.o_proj" in error.message


def test_tensors_of_a_module_that_is_not_targeted(tmp_path: Path) -> None:
    error = fault_of(tmp_path, tensors(), target_modules=["q_proj"])
    assert "down_proj" in error.message and "target" in error.message


@pytest.mark.parametrize(
    "names", [["q_proj", "down_proj", "score"], ["c_attn"], ["proj"], ["model.layers.2.mlp.up_proj"]]
)
def test_unknown_target_modules_are_named(tmp_path: Path, names: list[str]) -> None:
    error = fault_of(tmp_path, tensors(), target_modules=names)
    assert error.field_or_tensor == "target_modules" and repr(names[-1]) in error.message


def test_a_regex_that_matches_nothing(tmp_path: Path) -> None:
    assert fault_of(tmp_path, tensors(), target_modules="q_proj").field_or_tensor == "target_modules"


def test_a_layer_that_is_not_there(tmp_path: Path) -> None:
    error = fault_of(tmp_path, tensors(), layers_to_transform=[0, 2])
    assert error.field_or_tensor == "layers_to_transform" and "layer 2" in error.message


@pytest.mark.parametrize(
    ("module", "side", "shape"),
    [
        ("q_proj", "A", [RANK, 31]),
        ("q_proj", "A", [32, RANK]),
        ("q_proj", "B", [33, RANK]),
        ("down_proj", "B", [32, RANK + 1]),
        ("down_proj", "A", [RANK]),
        ("down_proj", "A", [RANK, 48, 1]),
        ("down_proj", "A", [0, 48]),
    ],
)
def test_a_wrong_shape_names_tensor_and_both_shapes(
    tmp_path: Path, module: str, side: str, shape: list[int]
) -> None:
    name = tensor_name(module, 1, side)
    size = 4
    for length in shape:
        size *= length
    error = fault_of(tmp_path, {**tensors(), name: ("F32", shape, b"\0" * size)})
    assert error.field_or_tensor == name and str(shape) in error.message


def test_a_rank_that_differs_from_the_config(tmp_path: Path) -> None:
    assert "rank 8 in the config" in fault_of(tmp_path, tensors(), r=8).message
    assert "rank 2 in the config" in fault_of(tmp_path, tensors(), rank_pattern={"down_proj": 2}).message


@pytest.mark.parametrize("dtype", ["F64", "I32", "F8_E4M3", "U8"])
def test_a_dtype_that_is_not_served(tmp_path: Path, dtype: str) -> None:
    size = {"F64": 8, "I32": 4, "F8_E4M3": 1, "U8": 1}[dtype]
    name = tensor_name("q_proj", 0, "A")
    error = fault_of(tmp_path, {**tensors(), name: (dtype, [RANK, 32], b"\0" * (RANK * 32 * size))})
    assert error.field_or_tensor == name and dtype in error.message


def test_a_rank_above_what_is_served(tmp_path: Path) -> None:
    assert fault_of(tmp_path, tensors(rank=65), r=65).field_or_tensor == "r"
    error = fault_of(tmp_path, tensors(), rank_pattern={"down_proj": 65})
    assert error.field_or_tensor == "rank_pattern" and "64" in error.message


def test_a_scale_that_overflows(tmp_path: Path) -> None:
    assert fault_of(tmp_path, tensors(), lora_alpha=1e300).field_or_tensor == "lora_alpha"


def test_two_adapters_in_one_file(tmp_path: Path) -> None:
    weights = {**tensors("q_proj"), **tensors("down_proj", infix=".other")}
    assert "several adapters" in fault_of(tmp_path, weights).message


def test_a_pattern_that_costs_too_much(tmp_path: Path) -> None:
    error = fault_of(tmp_path, tensors(), rank_pattern={f"(?:.?){{200}}x{i}": 2 for i in range(4000)})
    assert "too costly" in error.message


def test_a_base_model_whose_layers_have_unknown_names(tmp_path: Path) -> None:
    shape = BaseModelShape(SHAPE.num_layers, {**SHAPE.modules, "qkv_proj": (32, 96)}, SHAPE.max_lora_rank)
    with pytest.raises(InvalidAdapter, match="'qkv_proj'"):
        read_layout(write_adapter(tmp_path), shape)
