"""The gated activation of the feed-forward layer."""

from __future__ import annotations

import torch

from kernels import native, reference


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a contiguous [T, 2I] whose rows are (gate | up): [T, I], same dtype."""
    assert gate_up.is_contiguous()
    if gate_up.is_cuda:
        from kernels.gpu import activation as gpu

        return gpu.silu_mul(gate_up)
    kernels = native.compiled(gate_up.dtype)
    if kernels is None:
        return reference.silu_mul(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    kernels.silu_mul(out.data_ptr(), gate_up.data_ptr(), rows, width, torch.get_num_threads())
    return out
