"""Drawing the next token of each row, from its own logits, parameters and seed alone."""

from __future__ import annotations

import torch

from kernels import native, reference
from kernels.sampling_batch import GREEDY_BELOW, AllowedTokens, Sampled, SamplingBatch, TokenEdits

__all__ = ["GREEDY_BELOW", "AllowedTokens", "Sampled", "SamplingBatch", "TokenEdits", "sample"]


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Draw one token for each row of ``logits`` [S, V], as ``SamplingBatch`` describes.

    The logits are not changed. A row whose logits are not finite is reported in ``Sampled.finite`` and
    affects no other row.
    """
    if logits.is_cuda:
        from kernels.gpu import sampling as gpu

        return gpu.sample(logits, batch)
    kernels = native.compiled(logits.dtype)
    if kernels is None:
        return reference.sample(logits, batch)
    rows, vocab_size = logits.shape
    num_top = -1 if batch.num_logprobs is None else min(batch.num_logprobs, vocab_size)
    tokens, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    logprobs = torch.empty(rows)
    top_tokens, top_logprobs = (
        torch.empty(rows, max(num_top, 0), dtype=torch.int64),
        torch.empty(rows, max(num_top, 0)),
    )
    status = kernels.sample(
        *(logits.data_ptr(), batch.temperature.data_ptr(), batch.top_k.data_ptr(), batch.top_p.data_ptr()),
        *(batch.min_p.data_ptr(), batch.seeds.data_ptr(), batch.positions.data_ptr(), rows, vocab_size),
        *_edit_arguments(batch.edits),
        *_allowed_arguments(batch.allowed),
        *(num_top, tokens.data_ptr(), finite.data_ptr(), logprobs.data_ptr()),
        *(top_tokens.data_ptr(), top_logprobs.data_ptr(), torch.get_num_threads()),
    )
    if status != 0:
        raise MemoryError("no memory for the sampling kernel's scratch")
    if num_top < 0:
        return Sampled(tokens, finite)
    return Sampled(tokens, finite, logprobs, top_tokens, top_logprobs)


def _edit_arguments(edits: TokenEdits | None) -> tuple[int | None, ...]:
    if edits is None:
        return (None,) * 8 + (0,)
    return (
        *(edits.rows.data_ptr(), edits.tokens.data_ptr(), edits.biases.data_ptr(), edits.counts.data_ptr()),
        *(edits.seen.data_ptr(), edits.presence.data_ptr(), edits.frequency.data_ptr()),
        *(edits.repetition.data_ptr(), edits.rows.shape[0]),
    )


def _allowed_arguments(allowed: AllowedTokens | None) -> tuple[int | None, ...]:
    if allowed is None:
        return None, None, 0
    return allowed.lists.data_ptr(), allowed.bits.data_ptr(), allowed.bits.shape[1]
