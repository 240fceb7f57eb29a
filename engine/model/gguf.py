"""A model in one ``.gguf`` file: metadata, weights and tokenizer.

The metadata is parsed here rather than by ``gguf.GGUFReader``, which makes a numpy view for every word of
the vocabulary and takes seconds for it. The block formats are decoded by the ``gguf`` package.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.model.config import ModelConfig, RopeConfig, known_tokens, limit_context, parse_yarn
from engine.model.errors import ModelNotAvailable, UnsupportedModel

_YARN_USUAL = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}
"""What these fields say of the YaRN that is computed here."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32

_TENSOR_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_TENSOR_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class _Cursor:
    """Reads little-endian values one after another from a buffer."""

    def __init__(self, buffer: mmap.mmap, offset: int) -> None:
        self.buffer = buffer
        self.offset = offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def raw_string(self) -> bytes:
        length = self.scalar("Q")
        self.offset += length
        return self.buffer[self.offset - length : self.offset]

    def string(self) -> str:
        return self.raw_string().decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self.buffer, self.offset)
        self.offset += struct.calcsize(layout)
        return list(values)


class GgufFile:
    """Metadata and tensors of a ``.gguf`` file, which stays mapped while the object lives.

    It is a ``WeightSource``: tensors are asked for by their Hugging Face names.

    Raises:
        ModelNotAvailable: not a GGUF file of version 2 or 3, or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelNotAvailable(f"{path} is not a GGUF file.")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header(_Cursor(self._map, offset=4))
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ModelNotAvailable(f"{path} is damaged: its GGUF header cannot be read.") from error

    def _read_header(self, cursor: _Cursor) -> None:
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ModelNotAvailable(f"{self.path} has GGUF version {version}; supported are 2 and 3.")
        num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = cursor.string()
            self.metadata[name] = cursor.value(cursor.scalar("I"))
        self._tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = cursor.string()
            # GGUF counts dimensions from the fastest one, torch from the slowest.
            shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
            self._tensors[name] = (shape, cursor.scalar("I"), cursor.scalar("Q"))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        self._data_start = -(-cursor.offset // alignment) * alignment

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "(none)"))

    def field(self, name: str, default: Any = None) -> Any:
        """A field of the architecture's own section, such as ``block_count``.

        Raises:
            ModelNotAvailable: it is not there and has no default.
        """
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ModelNotAvailable(f"{self.path} lacks the field {self.architecture}.{name}.")
        return value

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self._shape("token_embd.weight")[0]

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor with this Hugging Face name."""
        return self._gguf_name(name) in self._tensors

    def get(self, name: str) -> torch.Tensor:
        """The tensor with this Hugging Face name, decoded to float32 in memory of its own.

        Raises:
            ModelNotAvailable: the file has no such tensor, or ends before it.
            UnsupportedModel: its block format cannot be decoded.
        """
        values = self._decode(self._gguf_name(name))
        if self.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            key = "attention.head_count" if "q_proj" in name else "attention.head_count_kv"
            values = _unpermute(values, self.field(key, self.field("attention.head_count")))
        return torch.from_numpy(np.ascontiguousarray(values))

    def raw(self, name: str) -> np.ndarray | None:
        """A tensor by its GGUF name, or None."""
        return self._decode(name) if name in self._tensors else None

    def _decode(self, name: str) -> np.ndarray:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        shape = self._shape(name)
        _, kind, offset = self._tensors[name]
        try:
            quantization = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError) as error:
            raise UnsupportedModel(f"Tensor {name} has the unknown GGML type {kind}.") from error
        row_bytes = shape[-1] // block * block_bytes
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        start = self._data_start + offset
        if start + rows * row_bytes > len(self._map):
            raise ModelNotAvailable(f"{self.path} is cut short: it ends before the tensor {name} does.")
        packed = np.frombuffer(self._map, np.uint8, rows * row_bytes, start).reshape(rows, row_bytes)
        try:
            values = dequantize(packed, quantization)
        except NotImplementedError as error:
            raise UnsupportedModel(f"Tensor {name} has the type {quantization.name}: {error}") from error
        if not values.flags.writeable:
            values = values.copy()
        return values.reshape(shape)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise ModelNotAvailable(f"{self.path} lacks the tensor {name}.")
        return self._tensors[name][0]

    @staticmethod
    def _gguf_name(name: str) -> str:
        if name in _TENSOR_NAMES:
            return _TENSOR_NAMES[name]
        _, _, layer, rest = name.split(".", 3)
        module, suffix = rest.rsplit(".", 1)
        return f"blk.{layer}.{_LAYER_TENSOR_NAMES[module]}.{suffix}"


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of q and k rows: rotated pairs are adjacent there, half a head apart here."""
    rows = weight.shape[0]
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def parse_gguf_config(file: GgufFile, *, max_model_len: int | None) -> ModelConfig:
    """Read the model's shape from a GGUF file's metadata.

    Raises:
        UnsupportedModel: an architecture or an option that the forward pass does not have.
    """
    architecture = file.architecture
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise UnsupportedModel(
            f"GGUF architecture {architecture!r} is not supported; supported are llama, qwen2 and qwen3."
        )
    for projection in ("q_proj", "o_proj"):
        name = f"model.layers.0.self_attn.{projection}.bias"
        if file.has(name) and (architecture, projection) != ("qwen2", "q_proj"):
            raise UnsupportedModel(f"A bias on {projection} is not supported in a GGUF {architecture} model.")
    heads = int(file.field("attention.head_count"))
    rope = _parse_rope(file)
    trained = rope.stretched(int(file.field("context_length")))
    # Within its window, sliding attention is full attention.
    trained = min(trained, int(file.field("attention.sliding_window", trained)))
    hidden = int(file.field("embedding_length"))
    head_dim = int(file.field("attention.key_length", hidden // heads))
    if int(file.field("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel("A GGUF model that rotates only a part of each head is not supported.")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.vocab_size,
        hidden_size=hidden,
        intermediate_size=int(file.field("feed_forward_length")),
        num_layers=int(file.field("block_count")),
        num_heads=heads,
        num_kv_heads=int(file.field("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_model_len=limit_context(trained, max_model_len),
        rms_norm_eps=float(file.field("attention.layer_norm_rms_epsilon")),
        rope=rope,
        tie_word_embeddings=not file.has("lm_head.weight"),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        eos_token_ids=known_tokens(_eos_token_ids(file), file.vocab_size),
    )


def _parse_rope(file: GgufFile) -> RopeConfig:
    theta = float(file.field("rope.freq_base", 10000.0))
    factors = file.raw("rope_freqs.weight")
    if factors is not None:
        return RopeConfig(theta, freq_factors=tuple(float(value) for value in factors))
    kind = file.field("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=float(file.field("rope.scaling.factor")))
    if kind == "yarn":
        return _parse_yarn(file, theta)
    raise UnsupportedModel(f"RoPE scaling {kind!r} of this GGUF file is not supported.")


def _parse_yarn(file: GgufFile, theta: float) -> RopeConfig:
    for name, usual in _YARN_USUAL.items():
        value = float(file.field(f"rope.scaling.{name}", usual))
        if value != usual:
            raise UnsupportedModel(f"A {name} of {value:g} for YaRN is not supported in a GGUF file.")
    length = int(file.field("context_length"))
    stated = {
        "factor": file.field("rope.scaling.factor"),
        "original_max_position_embeddings": file.field("rope.scaling.original_context_length", length),
        "beta_fast": file.field("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.field("rope.scaling.yarn_beta_slow", 1.0),
    }
    return parse_yarn(stated, theta, length)


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    stated = (file.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(int(token) for token in stated if token is not None)
