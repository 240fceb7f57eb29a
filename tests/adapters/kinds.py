"""One small adapter of every kind that is served, written by hand: fields of the config, and tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adapters.base_model import BaseModelShape
from tests.adapters.files import RANK, SHAPE, Tensors, config, tensor_name, tensors, write_adapter

HIDDEN, VOCAB = SHAPE.hidden_size, SHAPE.vocab_size
EMBEDDING = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"
ADDED = 3


@dataclass(frozen=True)
class Kind:
    """An adapter that fits `shape`."""

    fields: dict[str, Any]
    weights: Tensors
    shape: BaseModelShape = SHAPE

    def write(self, folder: Path, *, weights: Tensors | None = None) -> Path:
        """Writes its folder, perhaps with other weights."""
        return write_adapter(
            folder,
            config_json=config(**self.fields),
            weights=self.weights if weights is None else weights,
        )


def floats(*shape: int, seed: int = 1) -> tuple[str, list[int], bytes]:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return "F32", list(shape), values.tobytes()


def _kinds() -> dict[str, Kind]:
    linear = tensors()
    bias, magnitude = dict(linear), dict(linear)
    for layer in range(SHAPE.num_layers):
        for module in ("q_proj", "down_proj"):
            path = tensor_name(module, layer, "B").removesuffix(".lora_B.weight")
            bias[f"{path}.lora_B.bias"] = floats(SHAPE.modules[module][1])
            magnitude[f"{path}.lora_magnitude_vector"] = floats(SHAPE.modules[module][1])
    lora_in = {
        f"{EMBEDDING}.lora_embedding_A": floats(RANK, VOCAB),
        f"{EMBEDDING}.lora_embedding_B": floats(HIDDEN, RANK),
    }
    lora_out = {f"{HEAD}.lora_A.weight": floats(RANK, HIDDEN), f"{HEAD}.lora_B.weight": floats(VOCAB, RANK)}
    rows = floats(2, HIDDEN)
    whole, wider = floats(VOCAB, HIDDEN), floats(VOCAB + ADDED, HIDDEN)
    tied = replace(SHAPE, tied_embeddings=True)
    both = {f"{EMBEDDING}.weight": wider, f"{HEAD}.weight": wider}
    return {
        "plain": Kind({}, linear),
        "bias": Kind({"lora_bias": True}, bias),
        "dora": Kind({"use_dora": True}, magnitude),
        "activated": Kind({"alora_invocation_tokens": [5, 6, 7]}, linear),
        "embedding": Kind({"target_modules": ["embed_tokens"]}, lora_in),
        "lm_head": Kind({"target_modules": ["lm_head"]}, lora_out),
        "both ends, saved along": Kind(
            {"target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"]},
            {**linear, **lora_in, **lora_out, f"{EMBEDDING}.base_layer.weight": whole},
            tied,
        ),
        "saved": Kind({"modules_to_save": ["lm_head"]}, {**linear, f"{HEAD}.weight": whole}),
        "trained tokens": Kind(
            {"trainable_token_indices": [9, 4]},
            {**linear, f"{EMBEDDING}.token_adapter.trainable_tokens_delta": rows},
            tied,
        ),
        "added tokens": Kind({}, {**linear, **both}),
        "added tokens, saved": Kind(
            {"modules_to_save": ["embed_tokens"]},
            {
                **linear,
                **both,
                f"{EMBEDDING}.modules_to_save.weight": wider,
                f"{EMBEDDING}.original_module.weight": floats(VOCAB + ADDED, HIDDEN, seed=2),
            },
            tied,
        ),
    }


KINDS = _kinds()
