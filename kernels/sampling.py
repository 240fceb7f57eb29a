"""Drawing the next token of each row, from its own logits, parameters and seed alone."""

from __future__ import annotations

import torch

from kernels import reference
from kernels.sampling_batch import GREEDY_BELOW, Sampled, SamplingBatch, TokenEdits

__all__ = ["GREEDY_BELOW", "Sampled", "SamplingBatch", "TokenEdits", "sample"]


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Draw one token for each row of ``logits`` [S, V], as ``SamplingBatch`` describes.

    The logits are not changed. A row whose logits are not finite is reported in ``Sampled.finite`` and
    affects no other row.
    """
    if logits.is_cuda:
        from kernels.gpu import sampling as gpu

        return gpu.sample(logits, batch)
    return reference.sample(logits, batch)
