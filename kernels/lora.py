"""Adapters of many rows at once, each row with its own: ``y += scale * (x Aᵀ) Bᵀ``.

What an adapter does to the base product itself, before that and before the base's bias, is `apply_vectors`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kernels import native, reference
from kernels.activation import silu_mul
from kernels.linear import PackedWeight
from kernels.plans import RANK_PAGE, LoraPlan, LoraPool, RowVectors


def prepare(plan: LoraPlan, num_tokens: int) -> LoraPlan:
    """The plan, with whatever the device's kernels derive from it. Call once a step, before the first layer.

    Without it every product derives it again. Launches on the device of the plan, and may be captured.
    ``num_tokens`` is T, the rows of the step with those of the base model.
    """
    if plan.rows.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.prepare(plan, num_tokens)
    return plan


def apply_lora(x: torch.Tensor, y: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> None:
    """Add to the rows of ``y`` that the plan names their adapter's product, **in place**.

    Rows that the plan does not name are neither read nor written. Only live ranks of the pages are read.

    Args:
        x: [T, in], contiguous, in the pool's dtype.
        y: [T, out], contiguous, same dtype.
    """
    if plan.num_rows == 0:
        return
    if x.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.apply_lora(x, y, pool, plan)
    if native.compiled(x.dtype) is None:
        return reference.lora_expand(reference.lora_shrink(x, pool, plan), y, pool, plan)
    _launch(x, y, _empty_shrunk(pool, plan), pool, plan)


def add_lora(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    pool: LoraPool,
    plan: LoraPlan,
    weight: PackedWeight | None = None,
) -> torch.Tensor:
    """``product(x)``, the base product [T, out], with the adapters' added to the rows that the plan names.

    A GPU may run a part of the adapters' work beside the base product.

    Args:
        product: called once, or not; launches on the current stream, and returns a tensor of its own.
        x: [T, in], contiguous, in the pool's dtype.
        weight: given where the product is ``linear(x, weight)`` and nothing else: it may then be computed so
            that both are summed at once or go side by side, and ``product`` is not called.
    """
    if x.is_cuda and plan.num_rows:
        from kernels.gpu import lora as gpu

        return gpu.add_lora(product, x, pool, plan, None if weight is None else weight.data)
    y = product(x)
    apply_lora(x, y, pool, plan)
    return y


def silu_mul_add_lora(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    pool: LoraPool,
    plan: LoraPlan,
    weight: PackedWeight | None = None,
) -> torch.Tensor:
    """``silu_mul(add_lora(...))`` for the pool of gate and up: [T, I] in x's dtype."""
    if x.is_cuda and plan.num_rows:
        from kernels.gpu import lora_gated as gpu

        return gpu.silu_mul_add_lora(product, x, pool, plan, None if weight is None else weight.data)
    return silu_mul(add_lora(product, x, pool, plan))


def lora_shrink(x: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> torch.Tensor:
    """The first half, ``scale * x Aᵀ``, apart so that it can run beside the base product.

    Returns:
        float32 [R, P, M, 16], by entry of ``plan.rows``, page of its adapter, projection and rank row.
        Undefined above the live ranks, and where the page's scale is 0.
    """
    if x.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.lora_shrink(x, pool, plan)
    if native.compiled(x.dtype) is None:
        return reference.lora_shrink(x, pool, plan)
    shrunk = _empty_shrunk(pool, plan)
    _launch(x, None, shrunk, pool, plan)
    return shrunk


def lora_expand(shrunk: torch.Tensor, y: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> None:
    """The second half: add ``shrunk Bᵀ`` to ``y``'s rows **in place**."""
    if y.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.lora_expand(shrunk, y, pool, plan)
    if native.compiled(y.dtype) is None:
        return reference.lora_expand(shrunk, y, pool, plan)
    _launch(None, y, shrunk, pool, plan)


def apply_vectors(y: torch.Tensor, pool: LoraPool, vectors: RowVectors) -> None:
    """Scale and shift the named rows of ``y`` by their adapter's vectors, **in place**.

    That is ``y += y * gain + shift``. Other rows are neither read nor written.

    Args:
        y: [T, out], contiguous, in the pool's dtype.
    """
    if y.is_cuda:
        from kernels.gpu import lora_vectors as gpu

        return gpu.apply_vectors(y, pool, vectors)
    kernels = native.compiled(y.dtype)
    if kernels is None:
        return reference.apply_vectors(y, pool, vectors)
    kernels.lora_vectors(
        *(y.data_ptr(), pool.b.data_ptr(), vectors.rows.data_ptr(), vectors.pages.data_ptr()),
        *(vectors.rows.shape[0], y.shape[1], torch.get_num_threads()),
    )


def _empty_shrunk(pool: LoraPool, plan: LoraPlan) -> torch.Tensor:
    return torch.empty(plan.rows.shape[0], plan.segment_pages.shape[1], pool.a.shape[1], RANK_PAGE)


@functools.cache
def _column_splits(splits: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(splits, dtype=torch.int64)


def _launch(
    x: torch.Tensor | None,
    y: torch.Tensor | None,
    shrunk: torch.Tensor,
    pool: LoraPool,
    plan: LoraPlan,
) -> None:
    """The CPU kernel: shrink where ``x`` is given, expand where ``y`` is given."""
    kernels = native.compiled(pool.a.dtype)
    assert kernels is not None
    _, num_projections, _, in_features = pool.a.shape
    kernels.lora(
        *(None if x is None else x.data_ptr(), None if y is None else y.data_ptr(), shrunk.data_ptr()),
        *(pool.a.data_ptr(), pool.b.data_ptr(), pool.scales.data_ptr()),
        *(_column_splits(pool.splits).data_ptr(), plan.rows.data_ptr(), plan.segment_starts.data_ptr()),
        *(plan.segment_pages.data_ptr(), plan.segment_ranks.data_ptr(), plan.num_rows, plan.num_segments),
        *(plan.segment_pages.shape[1], num_projections, in_features, pool.b.shape[2]),
        torch.get_num_threads(),
    )
