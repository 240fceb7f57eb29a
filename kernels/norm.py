"""Root mean square layer normalisation."""

from __future__ import annotations

import torch

from kernels import native, reference


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """``h / sqrt(mean(h²) + eps) * weight`` of each row, with ``h = x``, or ``h = residual + x``.

    Args:
        x: [T, H], contiguous.
        weight: [H], in x's dtype.
        eps: added to the mean square.
        residual: [T, H], contiguous. **Overwritten** with ``residual + x``.

    Returns:
        [T, H] in x's dtype. The sums are in float32; the norm is of the residual as stored.
    """
    assert x.is_contiguous()
    if x.is_cuda:
        from kernels.gpu import norm as gpu

        return gpu.rms_norm(x, weight, eps, residual)
    kernels = native.compiled(x.dtype)
    if kernels is None:
        return reference.rms_norm(x, weight, eps, residual)
    out = torch.empty_like(x)
    kernels.rms_norm(
        *(out.data_ptr(), x.data_ptr(), None if residual is None else residual.data_ptr()),
        *(weight.data_ptr(), x.shape[0], x.shape[1], eps, torch.get_num_threads()),
    )
    return out
