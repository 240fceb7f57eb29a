"""The shape of a model of the Llama family, whatever file format it came in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapters.base_model import llama_modules
from engine.model.errors import UnsupportedModel

PROJECTION_GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The projections of a layer that share an input; each group is one fused weight and one LoRA pool."""

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    ``kind`` is ``default``, ``linear``, ``llama3`` or ``yarn``. ``freq_factors``, one divisor for each
    frequency, is how a GGUF file states a scaling that it has already worked out. ``fast_rotations`` and
    ``slow_rotations``, over the original length, are YaRN's β; its ``attention_factor`` multiplies the
    cosines and sines.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_len: int = 0
    fast_rotations: float = 32.0
    slow_rotations: float = 1.0
    whole_dimensions: bool = True
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] | None = None

    def stretched(self, trained: int) -> int:
        """The context length that it makes of the one that a model states.

        YaRN is mostly switched on by hand, with that left as it was: what it stretches to is what counts.
        """
        return max(trained, int(self.original_max_len * self.factor)) if self.kind == "yarn" else trained


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a model that is not a weight. ``max_model_len`` is in tokens.

    Raises:
        UnsupportedModel: heads that cannot be shared out, or halved for the rotary embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise UnsupportedModel(
                f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} K/V heads are not "
                "supported: the first must be a multiple of the last, and the size even."
            )

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """(in, out) features of each projection of a layer, by its PEFT target name."""
        return llama_modules(
            hidden=self.hidden_size,
            inner=self.intermediate_size,
            q_out=self.num_heads * self.head_dim,
            kv_out=self.num_kv_heads * self.head_dim,
        )

    def group_in(self, group: str) -> int:
        """Input features of a projection group."""
        return self.modules[PROJECTION_GROUPS[group][0]][0]

    def group_splits(self, group: str) -> tuple[int, ...]:
        """Column offsets of a group's projections in its fused output, from 0 to the total."""
        offsets = [0]
        for projection in PROJECTION_GROUPS[group]:
            offsets.append(offsets[-1] + self.modules[projection][1])
        return tuple(offsets)


def parse_hf_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], *, max_model_len: int | None
) -> ModelConfig:
    """Read a Hugging Face ``config.json`` (and what ``generation_config.json`` adds to it).

    Raises:
        UnsupportedModel: an architecture or an option that the forward pass does not have, or a
            ``max_model_len`` beyond what the model was made for.
    """
    architecture = _architecture(raw)
    for field in _REQUIRED:
        if field not in raw:
            raise UnsupportedModel(f"config.json lacks the field {field!r}.")
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config in config.json: quantized weights are not supported.")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is.")
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise UnsupportedModel(f"{field}=true in config.json is not supported.")
    vocab_size = int(raw["vocab_size"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        max_model_len=limit_context(_context_length(raw, architecture), max_model_len),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=_parse_rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        eos_token_ids=known_tokens(_eos_token_ids(raw, generation), vocab_size),
    )


def known_tokens(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Without those that the model cannot draw, and repetitions: files name end tokens they do not have."""
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))


def limit_context(trained: int, asked: int | None) -> int:
    """The context length to serve: what was asked for, at most what the model can do.

    Raises:
        UnsupportedModel: more was asked for.
    """
    if asked is None:
        return trained
    if asked > trained:
        raise UnsupportedModel(
            f"--max-model-len {asked} is more than the {trained} tokens this model supports; lower it."
        )
    return asked


def _context_length(raw: Mapping[str, Any], architecture: str) -> int:
    """Tokens of context in which full attention is what the model computes.

    A sliding window makes no difference below its own length, so it only limits the context.
    """
    trained = _parse_rope(raw).stretched(int(raw["max_position_embeddings"]))
    if architecture == "mistral":
        window = raw.get("sliding_window", 4096)
    else:
        window = raw.get("sliding_window") if raw.get("use_sliding_window", False) else None
    return trained if window is None else min(trained, int(window))


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or ["(none)"]
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    supported = ", ".join(_ARCHITECTURES)
    raise UnsupportedModel(f"Architecture {names[0]} is not supported; supported are {supported}.")


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling``.

    Where both are there, or an original length stands beside them, the one counts that transformers takes.
    """
    stated: Mapping[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    original = raw.get("original_max_position_embeddings")
    if original is not None:
        stated = {**stated, "original_max_position_embeddings": original}
    theta = float(stated.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if float(raw.get("partial_rotary_factor") or stated.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("A partial_rotary_factor other than 1 is not supported.")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=float(stated["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor=float(stated["factor"]),
            low_freq_factor=float(stated["low_freq_factor"]),
            high_freq_factor=float(stated["high_freq_factor"]),
            original_max_len=int(stated["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        return parse_yarn(stated, theta, int(raw["max_position_embeddings"]))
    raise UnsupportedModel(
        f"RoPE type {kind!r} is not supported; supported are default, linear, llama3 and yarn."
    )


def parse_yarn(stated: Mapping[str, Any], theta: float, max_len: int) -> RopeConfig:
    """Read the options of YaRN, as transformers names them, with its defaults."""
    original = int(stated.get("original_max_position_embeddings") or max_len)
    factor = float(stated.get("factor") or max_len / original)
    attention = stated.get("attention_factor")
    if attention is None:
        scale, under = float(stated.get("mscale") or 0.0), float(stated.get("mscale_all_dim") or 0.0)
        both = scale and under
        attention = _yarn_scale(factor, scale if both else 1.0) / _yarn_scale(factor, under if both else 0.0)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_len=original,
        fast_rotations=float(stated.get("beta_fast") or 32.0),
        slow_rotations=float(stated.get("beta_slow") or 1.0),
        whole_dimensions=bool(stated.get("truncate", True)),
        attention_factor=float(attention),
    )


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    stated = generation.get("eos_token_id", raw.get("eos_token_id"))
    if stated is None:
        return ()
    return tuple(stated) if isinstance(stated, list) else (int(stated),)
