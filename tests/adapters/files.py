"""Writes adapters' files byte by byte, good and bad, without PEFT: a small base model and what fits it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from adapters.base_model import BaseModelShape

SHAPE = BaseModelShape(
    num_layers=2,
    modules={
        "q_proj": (32, 32),
        "k_proj": (32, 16),
        "v_proj": (32, 16),
        "o_proj": (32, 32),
        "gate_proj": (32, 48),
        "up_proj": (32, 48),
        "down_proj": (48, 32),
    },
    max_lora_rank=64,
    vocab_size=64,
)
PARENTS = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
RANK = 4

Tensors = dict[str, tuple[str, list[int], bytes]]
"""Name → dtype, shape, data; in the order of the data."""


def config(**changes: Any) -> dict[str, Any]:
    """A config as PEFT writes it, with some fields set otherwise."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base/model",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": 0.05,
        **changes,
    }


def tensor_name(module: str, layer: int, side: str, infix: str = "") -> str:
    path = f"model.layers.{layer}.{PARENTS.get(module, 'mlp')}.{module}"
    return f"base_model.model.{path}.lora_{side}{infix}.weight"


def tensors(*modules: str, rank: int = RANK, infix: str = "", seed: int = 0) -> Tensors:
    """Random float32 weights for both sides of `modules` (q_proj and down_proj) in all layers."""
    random = np.random.default_rng(seed)
    result: Tensors = {}
    for layer in range(SHAPE.num_layers):
        for module in modules or ("q_proj", "down_proj"):
            in_features, out_features = SHAPE.modules[module]
            for side, shape in (("A", [rank, in_features]), ("B", [out_features, rank])):
                values = random.standard_normal(shape, dtype=np.float32)
                result[tensor_name(module, layer, side, infix)] = ("F32", shape, values.tobytes())
    return result


def safetensors(entries: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file whose data lie in the order of `entries`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape, data) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    return with_header(json.dumps(header).encode(), b"".join(data for _, _, data in entries.values()))


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def write_adapter(
    folder: Path,
    *,
    config_json: Mapping[str, Any] | bytes | None = None,
    weights: Tensors | bytes | None = None,
) -> Path:
    """Writes an adapter's folder: a valid one where nothing is given."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = config_json if isinstance(config_json, bytes) else json.dumps(config_json or config()).encode()
    (folder / CONFIG_FILE).write_bytes(raw)
    data = weights if isinstance(weights, bytes) else safetensors(tensors() if weights is None else weights)
    (folder / WEIGHTS_FILE).write_bytes(data)
    return folder
