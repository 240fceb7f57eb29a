"""The forward pass of the Llama family over a flat batch of tokens.

Llama, Mistral and Qwen2/3 differ in a bias on q/k/v and in a norm of each query and key head; everything
else is one code. The projections that share an input are one fused weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch.nn.functional import embedding

from engine.kv_cache import KVCache
from engine.model.adapter_ends import StepEnds
from engine.model.config import PROJECTION_GROUPS, ModelConfig
from engine.model.errors import UnsupportedModel
from engine.model.lora_pool import LayerLoraPools, RankPagePool
from engine.model.rope import rope_table
from engine.model.weights import WeightSource
from kernels.kv_write import rope_write_kv
from kernels.linear import PackedWeight, linear, pack_weight, unpack_weight
from kernels.lora import add_lora, apply_vectors, prepare, silu_mul_add_lora
from kernels.norm import rms_norm
from kernels.paged_attention import paged_attention
from kernels.paged_attention import prepare as prepare_attention
from kernels.plans import AttentionPlan, LoraPlan, LoraPool

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What the model reads of a step. Written by ``engine.batch``, the same for every layer.

    Attributes:
        tokens: int64 [T].
        attention, lora: see ``kernels.plans``.
        output_rows: int64 [S]. The flat rows whose logits are wanted.
        ends: None where no adapter of the step changes the embedding or ``lm_head``.
    """

    tokens: torch.Tensor
    attention: AttentionPlan
    lora: LoraPlan
    output_rows: torch.Tensor
    ends: StepEnds | None = None


class LoraLinear:
    """The fused base product of one projection group, with each row's own adapter on top."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight: PackedWeight = pack_weight(weight)
        self._bias = bias

    @property
    def weight(self) -> torch.Tensor:
        """The base weight [out, in]; not to be written."""
        return unpack_weight(self._weight)

    def __call__(self, x: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> torch.Tensor:
        return add_lora(partial(self._base, pool=pool, plan=plan), x, pool, plan, self._plain_weight(plan))

    def silu_mul(self, x: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> torch.Tensor:
        """``silu(gate) * up`` of the product, for the projections gate and up."""
        base = partial(self._base, pool=pool, plan=plan)
        return silu_mul_add_lora(base, x, pool, plan, self._plain_weight(plan))

    def _plain_weight(self, plan: LoraPlan) -> PackedWeight | None:
        """The weight, where the product with it is all there is to the base."""
        return self._weight if plan.vectors is None and self._bias is None else None

    def _base(self, x: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> torch.Tensor:
        y = linear(x, self._weight)
        if plan.vectors is not None:
            apply_vectors(y, pool, plan.vectors)
        if self._bias is not None:
            y += self._bias
        return y


class DecoderLayer:
    """One layer: attention and feed-forward, each with its norm before it."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        loader = _LayerLoader(config, source, index, dtype, device)
        self._config = config
        hidden, dim = config.hidden_size, config.head_dim
        self._input_norm = loader.vector("input_layernorm.weight", hidden)
        self._qkv = loader.fused("qkv", "self_attn", bias=config.qkv_bias)
        self._o = loader.fused("o", "self_attn", bias=False)
        self._post_norm = loader.vector("post_attention_layernorm.weight", hidden)
        self._gate_up = loader.fused("gate_up", "mlp", bias=False)
        self._down = loader.fused("down", "mlp", bias=False)
        self._q_norm = loader.vector("self_attn.q_norm.weight", dim) if config.qk_norm else None
        self._k_norm = loader.vector("self_attn.k_norm.weight", dim) if config.qk_norm else None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        cache: tuple[torch.Tensor, torch.Tensor],
        pools: LayerLoraPools,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer; writes the step's keys and values into ``cache``.

        Args:
            x: [T, H], what the layer before added, or the embeddings when ``residual`` is None.
            residual: [T, H], the residual stream without ``x``; overwritten.

        Returns:
            The same pair for the next layer.
        """
        config = self._config
        if residual is None:
            residual = x
            x = rms_norm(x, self._input_norm, config.rms_norm_eps)
        else:
            x = rms_norm(x, self._input_norm, config.rms_norm_eps, residual)
        qkv = self._qkv(x, pools.qkv, batch.lora)
        if self._q_norm is not None and self._k_norm is not None:
            self._norm_heads(qkv, self._q_norm, self._k_norm)
        keys, values = cache
        rope_write_kv(qkv, cos_sin, batch.attention, keys, values, num_heads=config.num_heads)
        attended = paged_attention(
            qkv, keys, values, batch.attention, num_heads=config.num_heads, scale=config.head_dim**-0.5
        )
        x = self._o(attended, pools.o, batch.lora)
        x = rms_norm(x, self._post_norm, config.rms_norm_eps, residual)
        x = self._gate_up.silu_mul(x, pools.gate_up, batch.lora)
        return self._down(x, pools.down, batch.lora), residual

    def group_weight(self, group: str) -> torch.Tensor:
        """The fused base weight of a projection group, [out, in]; not to be written."""
        return {"qkv": self._qkv, "o": self._o, "gate_up": self._gate_up, "down": self._down}[group].weight

    def _norm_heads(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Qwen3: normalise every head of q and k by itself, in place."""
        config, dim = self._config, self._config.head_dim
        q_end = config.num_heads * dim
        k_end = q_end + config.num_kv_heads * dim
        for columns, weight in ((qkv[:, :q_end], q_norm), (qkv[:, q_end:k_end], k_norm)):
            heads = columns.contiguous().view(-1, dim)
            columns.copy_(rms_norm(heads, weight, config.rms_norm_eps).view_as(columns))


class LlamaModel:
    """All layers and both ends. Holds weights only: caches and adapters are arguments of a call."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        table = (config.vocab_size, config.hidden_size)
        self._embeddings = _converted(source, "model.embed_tokens.weight", table, dtype, device)
        self._layers = [DecoderLayer(config, source, i, dtype, device) for i in range(config.num_layers)]
        self._norm = _converted(source, "model.norm.weight", table[1:], dtype, device)
        head = (
            self._embeddings
            if config.tie_word_embeddings
            else _converted(source, "lm_head.weight", table, dtype, device)
        )
        self._lm_head = pack_weight(head)
        self._cos_sin = rope_table(config, device)

    def first_layers(self, count: int) -> LlamaModel:
        """The model of the first layers alone, over the same weights."""
        part = copy(self)
        part.config = replace(self.config, num_layers=count)
        part._layers = self._layers[:count]
        return part

    def forward(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        adapters: RankPagePool,
        *,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Final hidden states [S, H] of ``batch.output_rows``; writes the step's keys and values.

        Args:
            num_layers: of the first layers alone, for the sake of the kernels; None: of all.
        """
        heads = {"num_heads": self.config.num_heads, "num_kv_heads": self.config.num_kv_heads}
        batch = replace(
            batch,
            lora=prepare(batch.lora, batch.tokens.shape[0]),
            attention=prepare_attention(batch.attention, **heads, dtype=self.dtype),
        )
        if batch.ends is None:
            x = embedding(batch.tokens, self._embeddings)
        else:
            x = batch.ends.embed(batch.tokens, self._embeddings)
        residual: torch.Tensor | None = None
        layers = zip(self._layers, cache.layers, adapters.layers, strict=True)
        for layer, kv, pools in islice(layers, num_layers):
            x, residual = layer(x, residual, batch, kv, pools, self._cos_sin)
        assert residual is not None, "a model has at least one layer"
        rows = batch.output_rows
        return rms_norm(x[rows], self._norm, self.config.rms_norm_eps, residual[rows])

    def logits(self, hidden: torch.Tensor, ends: StepEnds | None = None) -> torch.Tensor:
        """[S, H] to [S, vocab_size], or wider where ``ends`` add tokens; S is at least 1."""
        logits = linear(hidden, self._lm_head)
        return logits if ends is None else ends.change_logits(hidden, logits)

    def group_weight(self, layer: int, group: str) -> torch.Tensor:
        """The fused base weight of a projection group, [out, in]; not to be written."""
        return self._layers[layer].group_weight(group)

    def embedding_weight(self) -> torch.Tensor:
        """[vocab_size, H]; not to be written."""
        return self._embeddings

    def lm_head_weight(self) -> torch.Tensor:
        """[vocab_size, H]; the embedding's very tensor where they are tied. Not to be written."""
        return self._embeddings if self.config.tie_word_embeddings else unpack_weight(self._lm_head)


class _LayerLoader:
    """Reads one layer's weights: converted one at a time, fused by group."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._source = source
        self._prefix = f"model.layers.{index}."
        self._dtype = dtype
        self._device = device

    def vector(self, name: str, width: int) -> torch.Tensor:
        return _converted(self._source, self._prefix + name, (width,), self._dtype, self._device)

    def fused(self, group: str, parent: str, *, bias: bool) -> LoraLinear:
        splits, width = self._config.group_splits(group), self._config.group_in(group)
        weight = torch.empty(splits[-1], width, dtype=self._dtype, device=self._device)
        bias_row = torch.empty(splits[-1], dtype=self._dtype, device=self._device) if bias else None
        for m, projection in enumerate(PROJECTION_GROUPS[group]):
            name = f"{self._prefix}{parent}.{projection}"
            _copy(self._source, f"{name}.weight", weight[splits[m] : splits[m + 1]])
            if bias_row is not None:
                _copy(self._source, f"{name}.bias", bias_row[splits[m] : splits[m + 1]])
        return LoraLinear(weight, bias_row)


def _converted(
    source: WeightSource, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor in memory of its own, never a view of the file."""
    return _checked(source, name, shape).to(device=device, dtype=dtype, copy=True)


def _copy(source: WeightSource, name: str, target: torch.Tensor) -> None:
    target.copy_(_checked(source, name, target.shape))


def _checked(source: WeightSource, name: str, shape: Sequence[int]) -> torch.Tensor:
    """The kernels read as far as the config says, so no tensor may be smaller, nor mean other numbers."""
    tensor = source.get(name)
    if tuple(tensor.shape) != tuple(shape):
        raise UnsupportedModel(
            f"Tensor {name} has the shape {tuple(tensor.shape)}; config.json implies {tuple(shape)}."
        )
    if tensor.dtype not in _WEIGHT_DTYPES:
        raise UnsupportedModel(f"Tensor {name} is of {tensor.dtype}; quantized weights are not supported.")
    return tensor
