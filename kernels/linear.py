"""The base model's matrix products, on weights laid out once for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear as dense_linear

_TYPICAL_ROWS = 16
"""The number of rows for which oneDNN chooses its weight layout; any number of rows may be multiplied."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] in the layout that ``linear`` wants; opaque."""

    data: torch.Tensor
    in_features: int
    out_features: int
    onednn: bool


def pack_weight(weight: torch.Tensor) -> PackedWeight:
    """Lay out a [out, in] weight for ``linear``. bfloat16 on a CPU is copied, anything else is shared."""
    out_features, in_features = weight.shape
    onednn = (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
    )
    data = weight
    if onednn:
        data = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    return PackedWeight(data, in_features, out_features, onednn)


def linear(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """``x Wᵀ``: [T, in] → [T, out] in x's dtype, which must be the weight's."""
    if packed.onednn:
        return torch.ops.mkldnn._linear_pointwise(x, packed.data, None, "none", [], "")
    if x.is_cuda:
        from kernels.gpu import linear as gpu

        if gpu.fits(x, packed.data):
            return gpu.linear(x, packed.data)
    return dense_linear(x, packed.data)


def unpack_weight(packed: PackedWeight) -> torch.Tensor:
    """The weight [out, in] again, its values unchanged: the very tensor where it is shared, else a copy."""
    return packed.data.to_dense() if packed.onednn else packed.data
