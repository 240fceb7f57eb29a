"""Adapters of random weights in PEFT's format, for SmolLM2-135M: to measure with, not to talk to.

And which of many adapters requests name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

NUM_LAYERS = 30
HIDDEN, KEYS_AND_VALUES, INTERMEDIATE = 576, 192, 1536
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
# Inputs and outputs of every linear layer.
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KEYS_AND_VALUES),
    "self_attn.v_proj": (HIDDEN, KEYS_AND_VALUES),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}


def draw(num_adapters: int, num_requests: int, *, zipf: bool, seed: int) -> list[int]:
    """The number of each request's adapter, drawn from all alike, or by Zipf's law, where 0 comes most."""
    weights = [1 / (number + 1) if zipf else 1.0 for number in range(num_adapters)]
    return random.Random(seed).choices(range(num_adapters), weights, k=num_requests)


def page_bytes(item_bytes: int) -> int:
    """Bytes of a rank page of an engine whose weights have so many bytes each, scales included."""
    widths = sum(inputs + outputs for inputs, outputs in MODULES.values())
    return NUM_LAYERS * (16 * widths * item_bytes + 4 * len(MODULES))


def write_adapter(folder: Path, *, rank: int, seed: int, modules: Collection[str] = MODULES) -> None:
    """Write an adapter of some linear layers into a new folder. Its weights are small and change little."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(name.split(".")[1] for name in modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    weights: dict[str, np.ndarray] = {}
    for layer in range(NUM_LAYERS):
        for name in modules:
            inputs, outputs = MODULES[name]
            stem = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{stem}.lora_A.weight"] = _normal(generator, (rank, inputs), inputs**-0.5)
            weights[f"{stem}.lora_B.weight"] = _normal(generator, (outputs, rank), 0.01)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _normal(generator: np.random.Generator, shape: tuple[int, int], deviation: float) -> np.ndarray:
    return (generator.standard_normal(shape, dtype=np.float32) * deviation).astype(np.float16)
