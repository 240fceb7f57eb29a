"""The other families by graphs, against transformers + peft: biases, norms of heads, odd sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.gpu.peft_zoo import (
    NUM_IN_PEFT,
    ROUNDED,
    TIGHT,
    Engine,
    assert_computes_what_peft_does,
    make_zoo,
)

pytestmark = pytest.mark.gpu

OWNERS = [None if i % 5 == 4 else i % NUM_IN_PEFT for i in range(40)]
"""More rows than the products of few rows are made for, and then fewer."""


class Family(NamedTuple):
    """A model's classes and sizes, and how far its logits may be from peft's in a dtype."""

    model_class: type[PreTrainedModel]
    config_class: type[Any]
    overrides: dict[str, Any]
    dtype: str
    limit: float


FAMILIES = {
    "mistral, 3 heads a group": Family(
        MistralForCausalLM,
        MistralConfig,
        {"sliding_window": None, "num_attention_heads": 6, "intermediate_size": 1000},
        "bfloat16",
        ROUNDED,
    ),
    "qwen2, no groups": Family(
        Qwen2ForCausalLM,
        Qwen2Config,
        {"hidden_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 96},
        "bfloat16",
        ROUNDED,
    ),
    "qwen3, one group": Family(
        Qwen3ForCausalLM,
        Qwen3Config,
        {"num_key_value_heads": 1, "head_dim": 128, "tie_word_embeddings": True},
        "float32",
        TIGHT,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_adapters_compute_what_peft_does(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    zoo = make_zoo(
        tmp_path,
        num_adapters=NUM_IN_PEFT,
        model_class=family.model_class,
        config_class=family.config_class,
        overrides=family.overrides,
    )
    engine = Engine(zoo, family.dtype, graphs=True)
    for owners in (OWNERS, OWNERS[:7], [None] * 3):
        assert_computes_what_peft_does(engine, zoo, owners, family.limit)
