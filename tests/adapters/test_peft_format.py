"""Against PEFT itself: which modules it adapts, at which rank, with which scale."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.errors import InvalidAdapter
from adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    BaseModelShape,
    LoraTensor,
    map_tensors,
    parse_config,
    read_header,
)
from tests.adapters.files import (
    RANK,
    SHAPE,
    Tensors,
    config,
    tensor_name,
    tensors,
    write_adapter,
)


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=SHAPE.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def read(folder: Path) -> list[LoraTensor]:
    parsed = parse_config((folder / CONFIG_FILE).read_bytes())
    return map_tensors(parsed, read_header(folder / WEIGHTS_FILE), SHAPE)


PEFT_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 32},
    "rank 1": {"target_modules": ["down_proj"], "r": 1, "lora_alpha": 3},
    "alpha not whole": {"target_modules": ["down_proj"], "r": 7, "lora_alpha": 2.5},
    "all-linear": {"target_modules": "all-linear", "r": 4},
    "rslora": {"target_modules": ["q_proj"], "r": 16, "lora_alpha": 16, "use_rslora": True},
    "rank_pattern": {"target_modules": ["q_proj", "up_proj"], "r": 8, "rank_pattern": {"q_proj": 2}},
    "first pattern wins": {
        "target_modules": ["q_proj"],
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 3, "q_proj": 5},
        "alpha_pattern": {"q_proj": 7, "self_attn.q_proj": 9},
    },
    "patterns and rslora": {
        "target_modules": ["q_proj", "k_proj", "o_proj"],
        "use_rslora": True,
        "lora_alpha": 12,
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 2, r".*\.1\..*o_proj": 6},
        "alpha_pattern": {"[kq]_proj": 5, r"layers\.[0-9]+\.self_attn\.o_proj$": 1},
    },
    "pattern is no suffix": {"target_modules": ["q_proj"], "rank_pattern": {"proj": 2, "attn.q": 3}},
    "regex": {"target_modules": r".*\.(?:self_attn\.[qk]_proj|mlp\.down_proj)"},
    "regex of one layer": {"target_modules": r"model\.layers\.1\..*_proj"},
    "full names": {"target_modules": ["model.layers.0.mlp.up_proj", "layers.1.self_attn.o_proj"]},
    "one layer": {"target_modules": ["q_proj", "mlp.up_proj"], "layers_to_transform": 1},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "layers_pattern dotted": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["h", "model.layers"],
    },
    "full name beside layers": {
        "target_modules": ["model.layers.0.self_attn.q_proj", "k_proj"],
        "layers_to_transform": [1],
    },
    "exclude": {"target_modules": "all-linear", "exclude_modules": ["q_proj", "layers.1.mlp.up_proj"]},
    "exclude regex": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*layers\.0\..*"},
    "dropout and gaussian": {
        "target_modules": ["q_proj"],
        "lora_dropout": 0.3,
        "init_lora_weights": "gaussian",
    },
}


@pytest.mark.parametrize("fields", PEFT_CONFIGS.values(), ids=PEFT_CONFIGS.keys())
def test_modules_ranks_and_scales_are_those_of_peft(
    base: LlamaForCausalLM, tmp_path: Path, fields: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT advises against rsLoRA with patterns
        model = get_peft_model(base, PeftLoraConfig(task_type="CAUSAL_LM", **fields))
    try:
        assert isinstance(model, PeftModel)
        model.save_pretrained(str(tmp_path))
        expected = {
            name.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
            for name, layer in model.named_modules()
            if isinstance(layer, LoraLayer)
        }
    finally:
        model.unload()
    mapped = read(tmp_path)
    assert {path_of(tensor): (tensor.rank, tensor.scale) for tensor in mapped} == expected
    assert len(mapped) == 2 * len(expected)


def path_of(tensor: LoraTensor) -> str:
    return tensor_name(tensor.module, tensor.layer, "A").removeprefix("base_model.model.").split(".lora_A")[0]


def test_tensors_come_in_order_with_their_place(tmp_path: Path) -> None:
    weights = dict(reversed(tensors().items()))
    mapped = read(write_adapter(tmp_path, weights=weights))
    assert [tensor.canonical_name for tensor in mapped] == [
        f"layers.{layer}.{module}.{side}"
        for layer in (0, 1)
        for module in ("q_proj", "down_proj")
        for side in ("A", "B")
    ]
    content = (tmp_path / WEIGHTS_FILE).read_bytes()
    for tensor in mapped:
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == weights[tensor.name][2]


def test_the_adapter_name_infix_changes_nothing(tmp_path: Path) -> None:
    plain = read(write_adapter(tmp_path / "plain"))
    for infix in (".default", ".my-adapter"):
        written = read(write_adapter(tmp_path / infix, weights=tensors(infix=infix)))
        assert [(t.canonical_name, t.rank, t.shape, t.scale) for t in written] == [
            (t.canonical_name, t.rank, t.shape, t.scale) for t in plain
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
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.input_layernorm.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.modules_to_save.weight",
        "../../etc/passwd",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight\n",
        "ｂase_model",
        "",
    ],
)
def test_a_tensor_without_a_place_is_named(tmp_path: Path, name: str) -> None:
    error = fault_of(tmp_path, {**tensors(), name: ("F32", [2, 2], b"\0" * 16)})
    assert error.field_or_tensor == name


def test_reasons_say_what_the_tensor_belongs_to(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    assert "DoRA" in fault_of(tmp_path, {name: ("F32", [2, 2], b"\0" * 16)}).message


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
    "names", [["q_proj", "down_proj", "lm_head"], ["c_attn"], ["proj"], ["model.layers.2.mlp.up_proj"]]
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
    write_adapter(tmp_path)
    parsed, header = parse_config((tmp_path / CONFIG_FILE).read_bytes()), read_header(tmp_path / WEIGHTS_FILE)
    with pytest.raises(InvalidAdapter, match="'qkv_proj'"):
        map_tensors(parsed, header, shape)
