"""How two adapters differ: what their layouts say, and how far apart their updates are, module by module.

An update is ``scale * B A``, which is never formed: for two of them, with the entrywise product ∘,

    ⟨s₁ B₁ A₁, s₂ B₂ A₂⟩ = s₁ s₂ Σ (A₁ A₂ᵀ) ∘ (B₁ᵀ B₂)

so norms and distances (Frobenius) cost two products of the ranks' size. Memory stays flat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.layout import AdapterLayout, LowRank, StoredTensor

if TYPE_CHECKING:
    import numpy as np

_COLUMNS = 16_384
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """The updates of one module, over all layers."""

    module: str
    before: float
    """Norm of the first adapter's; 0 where it has none."""
    after: float
    difference: float
    """Norm of what the second adds to the first."""


def describe(layout: AdapterLayout) -> dict[str, Any]:
    """What an adapter is beside its numbers, as JSON has it."""
    updates = [update for _, update in _updates(layout)]
    return {
        "ranks": sorted({update.rank for update in updates}),
        "scales": sorted({update.scale for update in updates}),
        "dtypes": sorted({part.tensor.dtype for part in layout.parts}),
        "dora": any(update.magnitude for update in updates),
        "lora_bias": any(update.bias for update in updates),
        "saved_weights": bool(layout.saved_embedding or layout.saved_lm_head),
        "trained_tokens": len(layout.embedding_tokens.indices) if layout.embedding_tokens else 0,
    }


def compare(before: AdapterLayout, folder: Path, after: AdapterLayout, other: Path) -> list[ModuleChange]:
    """The changes of each module that either adapter updates; `folder` and `other` hold their files.

    Reads the weights of both. Raises OSError.
    """
    squares: dict[str, list[float]] = {}
    first, second = dict(_updates(before)), dict(_updates(after))
    for place in {**first, **second}:
        one, two = first.get(place), second.get(place)
        own = _product(one, folder, one, folder) if one else 0.0
        others = _product(two, other, two, other) if two else 0.0
        both = _product(one, folder, two, other) if one and two else 0.0
        sums = squares.setdefault(place[1], [0.0, 0.0, 0.0])
        for index, square in enumerate((own, others, own + others - 2 * both)):
            sums[index] += max(square, 0.0)  # rounding may take a difference of nothing below zero
    return [ModuleChange(module, *map(math.sqrt, sums)) for module, sums in squares.items()]


def _updates(layout: AdapterLayout) -> Iterator[tuple[tuple[int | None, str], LowRank]]:
    yield from layout.linear.items()
    for name, update in (("embed_tokens", layout.embedding), ("lm_head", layout.lm_head)):
        if update is not None:
            yield (None, name), update


def _product(one: LowRank, folder: Path, two: LowRank, other: Path) -> float:
    """The inner product of two updates of one module."""
    a = _gram(_map(one.a, folder), one.a.dtype, _map(two.a, other), two.a.dtype)
    b = _gram(_map(one.b, folder).T, one.b.dtype, _map(two.b, other).T, two.b.dtype)
    return one.scale * two.scale * float((a * b).sum())


def _gram(x: np.ndarray, x_dtype: str, y: np.ndarray, y_dtype: str) -> np.ndarray:
    """``x yᵀ`` in float64; of unlike widths, where one adds tokens, the narrower counts as padded with 0."""
    import numpy as np  # here, since every gateway imports this module, and should start quickly

    total = np.zeros((x.shape[0], y.shape[0]))
    for start in range(0, min(x.shape[1], y.shape[1]), _COLUMNS):
        stop = min(start + _COLUMNS, x.shape[1], y.shape[1])
        total += _widened(x[:, start:stop], x_dtype) @ _widened(y[:, start:stop], y_dtype).T
    return total


def _map(tensor: StoredTensor, folder: Path) -> np.ndarray:
    import numpy as np

    return np.memmap(folder / tensor.file, _STORED[tensor.dtype], "r", tensor.offset, tensor.shape)


def _widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """A copy in float64; bfloat16, which numpy lacks, is the upper half of float32."""
    import numpy as np

    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields whose values differ, each with both of them."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {name: {"from": before.get(name), "to": after.get(name)} for name in names}
