"""The table of rotary position embeddings."""

from __future__ import annotations

import math

import torch

from engine.model.config import ModelConfig, RopeConfig


def rope_table(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Cosines and sines of every position: float32 [max_model_len, head_dim], cos half | sin half.

    Computed as transformers does, in float32 and on the CPU, so that both rotate by the same angles.
    """
    positions = torch.arange(config.max_model_len, dtype=torch.float32)
    angles = torch.outer(positions, _inverse_frequencies(config.rope, config.head_dim))
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * config.rope.attention_factor
    return table.to(device)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.freq_factors is not None:
        return frequencies / torch.tensor(rope.freq_factors)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: divide the slow frequencies by the factor, keep the fast ones, blend those between."""
    wavelengths = 2 * math.pi / frequencies
    slow = wavelengths > rope.original_max_len / rope.low_freq_factor
    fast = wavelengths < rope.original_max_len / rope.high_freq_factor
    blend = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, blended))


def _yarn(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, §3.2): divide what turns seldom within the original length, keep what turns
    often, and go from one to the other along the dimensions.
    """
    half = len(frequencies)

    def dimension(rotations: float) -> float:
        """The pair of dimensions that turns so often."""
        turns = rope.original_max_len / (rotations * 2 * math.pi)
        return half * math.log(turns) / math.log(rope.theta)

    low, high = dimension(rope.fast_rotations), dimension(rope.slow_rotations)
    if rope.whole_dimensions:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * divided + frequencies * (1 - divided)
