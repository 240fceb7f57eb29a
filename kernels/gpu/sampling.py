"""Sampling on the device: ``kernels.sampling_batch`` says what, ``kernels.reference`` says it in torch.

No sort. The filters (top-k, min-p, top-p) amount to one threshold on a row, which a radix search finds: each
pass over the row settles two bits of it, by counting the tokens above three candidates (or summing their
mass), and bfloat16 logits have sixteen bits. Then one pass draws by Gumbel-max, a chunk of the vocabulary a
program, and a last small kernel joins the chunks.
"""

from __future__ import annotations

import torch

from kernels.gpu import sampling_kernels
from kernels.gpu.launch import ceil_div, dependent_launch, power_of_2
from kernels.sampling_batch import GREEDY_BELOW, AllowedTokens, Sampled, SamplingBatch, TokenEdits

_CHUNK = 4096
_PASSES = {torch.bfloat16: 8, torch.float16: 10, torch.float32: 16}
"""Pairs of bits, from the highest, that a float32 which came from this type can have set."""


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """See ``kernels.sampling.sample``. The host does not wait for the device."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return Sampled(tokens, finite)
    is_edited = batch.edits is not None or batch.allowed is not None
    edited = _edit(logits, batch.edits, batch.allowed) if is_edited else logits
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    num_chunks = ceil_div(vocab_size, _CHUNK)
    best = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    best_tokens = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    flags = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    pdl = dependent_launch(logits)
    launch = {"PDL": pdl, "launch_pdl": pdl}
    if not batch.all_greedy:
        sampling_kernels.find_threshold[(num_rows,)](
            edited,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            thresholds,
            edited.stride(0),
            vocab_size,
            GREEDY_BELOW=GREEDY_BELOW,
            PASSES=_PASSES[edited.dtype],
            BLOCK=min(8192, power_of_2(vocab_size)),
            num_warps=16,
            **launch,
        )
    sampling_kernels.draw_chunk[(num_rows, num_chunks)](
        logits,
        edited,
        batch.temperature,
        batch.seeds,
        batch.positions,
        thresholds,
        best,
        best_tokens,
        flags,
        logits.stride(0),
        edited.stride(0),
        vocab_size,
        GREEDY_BELOW=GREEDY_BELOW,
        ALL_GREEDY=batch.all_greedy,
        HAS_EDITS=is_edited,
        CHUNK=_CHUNK,
        num_warps=8,
        **launch,
    )
    sampling_kernels.join_chunks[(num_rows,)](
        best,
        best_tokens,
        flags,
        tokens,
        finite,
        NUM_CHUNKS=num_chunks,
        BLOCK=power_of_2(num_chunks),
        num_warps=1,
        **launch,
    )
    if batch.num_logprobs is None:
        return Sampled(tokens, finite)
    return _with_logprobs(logits, tokens, finite, batch.num_logprobs)


def _edit(logits: torch.Tensor, edits: TokenEdits | None, allowed: AllowedTokens | None) -> torch.Tensor:
    """A copy of ``logits`` with the sparse changes, which float32 is needed for, and only what is allowed."""
    edited = logits.clone() if edits is None else logits.to(torch.float32, copy=True)
    pdl = dependent_launch(logits)
    if edits is not None and (num_entries := edits.rows.shape[0]):
        block = 256
        sampling_kernels.edit[(ceil_div(num_entries, block),)](
            edited,
            edits.rows,
            edits.tokens,
            edits.biases,
            edits.counts,
            edits.seen,
            edits.presence,
            edits.frequency,
            edits.repetition,
            edited.stride(0),
            num_entries,
            BLOCK=block,
            PDL=pdl,
            launch_pdl=pdl,
        )
    if allowed is not None:
        num_rows, vocab_size = edited.shape
        sampling_kernels.restrict[(num_rows, ceil_div(vocab_size, _CHUNK))](
            edited,
            allowed.lists,
            allowed.bits,
            edited.stride(0),
            vocab_size,
            allowed.bits.shape[1],
            CHUNK=_CHUNK,
            PDL=pdl,
            launch_pdl=pdl,
        )
    return edited


def _with_logprobs(logits: torch.Tensor, tokens: torch.Tensor, finite: torch.Tensor, count: int) -> Sampled:
    logprobs = logits.float().log_softmax(dim=1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    # torch.topk leaves open which of equal values it takes: the token id, reversed, makes every key unique.
    bits = logprobs.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) | (0xFFFFFFFF - ids)
    top = 0xFFFFFFFF - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    return Sampled(tokens, finite, chosen, top, logprobs.gather(1, top))
