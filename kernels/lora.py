"""Low-rank adapters of many rows at once: ``y += scale * (x Aᵀ) Bᵀ``, each row with its own adapter."""

from __future__ import annotations

import torch

from kernels import reference
from kernels.plans import LoraPlan, LoraPool


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
    reference.lora_expand(reference.lora_shrink(x, pool, plan), y, pool, plan)


def lora_shrink(x: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> torch.Tensor:
    """The first half, ``scale * x Aᵀ``, apart so that it can run beside the base product.

    Returns:
        float32 [R, P, M, 16], by entry of ``plan.rows``, page of its adapter, projection and rank row.
        Undefined above the live ranks, and where the page's scale is 0.
    """
    if x.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.lora_shrink(x, pool, plan)
    return reference.lora_shrink(x, pool, plan)


def lora_expand(shrunk: torch.Tensor, y: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> None:
    """The second half: add ``shrunk Bᵀ`` to ``y``'s rows **in place**."""
    if y.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.lora_expand(shrunk, y, pool, plan)
    reference.lora_expand(shrunk, y, pool, plan)
