"""What an adapter must fit: the base model's shape, as engines tell it and as clients are told it."""

from __future__ import annotations

from typing import Any

from adapters.base_model import BaseModelShape
from protos.engine_pb2 import ModelInfo


def shape_of(info: ModelInfo) -> BaseModelShape:
    """The shape of the model that an engine serves, with the largest rank that it takes."""
    return BaseModelShape(
        num_layers=info.num_layers,
        modules={module.name: (module.in_features, module.out_features) for module in info.modules},
        max_lora_rank=info.max_lora_rank,
        vocab_size=info.vocab_size,
        tied_embeddings=info.tied_embeddings,
    )


def shape_object(info: ModelInfo) -> dict[str, Any]:
    """The same for a client's eyes."""
    shape = shape_of(info)
    return {
        "object": "adapter.base",
        "model": info.name,
        "num_layers": shape.num_layers,
        "modules": {name: list(features) for name, features in shape.modules.items()},
        "max_lora_rank": shape.max_lora_rank,
        "vocab_size": shape.vocab_size,
        "tied_embeddings": shape.tied_embeddings,
    }
