"""The shape of a base model from its own files, without loading it: a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.base_model import BaseModelShape, llama_modules
from adapters.strict_json import NotStrictJson, load_object

_MAX_CONFIG_BYTES = 4 * 1024 * 1024


class UnknownModel(ValueError):
    """A path that holds no model whose shape is known here; the message is a sentence for the user."""


def shape_of_files(path: Path, *, max_lora_rank: int) -> BaseModelShape:
    """The shape of the model at `path`. Raises `UnknownModel`."""
    try:
        if path.is_dir():
            return _of_hugging_face(path / "config.json", max_lora_rank)
        return _of_gguf(path, max_lora_rank)
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UnknownModel):
            raise
        fault = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise UnknownModel(
            f"The base model's shape cannot be read from {path} ({fault}); give a Hugging Face folder with "
            "config.json, or a GGUF file, of the Llama family."
        ) from None


def shape_of_object(told: Mapping[str, Any]) -> BaseModelShape:
    """The shape as a gateway's `GET /v1/adapter-base` tells it. Raises `UnknownModel`."""
    try:
        return BaseModelShape(
            num_layers=int(told["num_layers"]),
            modules={str(name): (int(i), int(o)) for name, (i, o) in told["modules"].items()},
            max_lora_rank=int(told["max_lora_rank"]),
            vocab_size=int(told["vocab_size"]),
            tied_embeddings=bool(told["tied_embeddings"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnknownModel(
            f"The server tells no base model's shape that is understood here ({error}); is it a Loraplex "
            "gateway of this version?"
        ) from None


def llama_shape(
    *,
    num_layers: int,
    hidden: int,
    inner: int,
    q_out: int,
    kv_out: int,
    vocab_size: int,
    tied: bool,
    max_lora_rank: int,
) -> BaseModelShape:
    """The shape of a model of the Llama family by its widths."""
    modules = llama_modules(hidden=hidden, inner=inner, q_out=q_out, kv_out=kv_out)
    return BaseModelShape(num_layers, modules, max_lora_rank, vocab_size, tied)


def _of_hugging_face(path: Path, max_lora_rank: int) -> BaseModelShape:
    with path.open("rb") as file:
        raw = file.read(_MAX_CONFIG_BYTES)
    try:
        config = load_object(raw)
    except NotStrictJson as error:
        raise UnknownModel(f"{path} {error}.") from None
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    return llama_shape(
        num_layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        inner=int(config["intermediate_size"]),
        q_out=heads * head_dim,
        kv_out=int(config.get("num_key_value_heads") or heads) * head_dim,
        vocab_size=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_lora_rank=max_lora_rank,
    )


def _of_gguf(path: Path, max_lora_rank: int) -> BaseModelShape:
    from gguf import GGUFReader  # here, since only this needs it, and it takes a while

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def field(name: str, default: int | None = None) -> int:
        found = reader.fields.get(f"{architecture}.{name}")
        if found is None and default is not None:
            return default
        if found is None:
            raise KeyError(f"{architecture}.{name}")
        return int(found.contents())

    shapes = {tensor.name: [int(size) for size in tensor.shape] for tensor in reader.tensors}
    heads, hidden = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length", hidden // heads)
    return llama_shape(
        num_layers=field("block_count"),
        hidden=hidden,
        inner=field("feed_forward_length"),
        q_out=heads * head_dim,
        kv_out=field("attention.head_count_kv", heads) * head_dim,
        vocab_size=shapes["token_embd.weight"][1],
        tied="output.weight" not in shapes,
        max_lora_rank=max_lora_rank,
    )
