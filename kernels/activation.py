"""The gated activation of the feed-forward layer."""

from __future__ import annotations

import torch

from kernels import reference


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a contiguous [T, 2I] whose rows are (gate | up): [T, I], same dtype."""
    if gate_up.is_cuda:
        from kernels.gpu import activation as gpu

        return gpu.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
