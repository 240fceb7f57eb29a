"""A made-up adapter, laid out before any real one comes."""

from __future__ import annotations

import json

import torch

from adapters.base_model import ROOTS, BaseModelShape
from adapters.peft_config import parse_config
from adapters.safetensors_header import RawHeader
from adapters.weight_files import RawHeaders
from engine.model.adapter_packing import PackingPlan, packing_plan
from engine.model.config import ModelConfig

_RANK = 16
_ITEM_BYTES = 2


def rehearse_packing(model: ModelConfig, dtype: torch.dtype) -> PackingPlan:
    """Works out the plan of an adapter on all linear layers, as PEFT would write it. Nothing is read.

    The first plan of a process takes far longer than the next, in Python with which the engine's loop takes
    turns: beside 128 decodes on a GPU, two steps and more between two tokens.
    """
    config = parse_config(
        json.dumps({"peft_type": "LORA", "r": _RANK, "target_modules": "all-linear"}).encode()
    )
    shape = BaseModelShape(model.num_layers, model.modules, _RANK)
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for path, (_, module) in shape.paths(ROOTS[0]).items():
        width_in, width_out = model.modules[module]
        for matrix, rows, columns in (("lora_A", _RANK, width_in), ("lora_B", width_out, _RANK)):
            begin, end = end, end + rows * columns * _ITEM_BYTES
            entries[f"base_model.model.{path}.{matrix}.weight"] = {
                "dtype": "BF16",
                "shape": [rows, columns],
                "data_offsets": [begin, end],
            }
    text = json.dumps(entries).encode()
    header = RawHeader(text, 8 + len(text) + end)
    return packing_plan(config, RawHeaders((("adapter_model.safetensors", header),), None), model, dtype)
