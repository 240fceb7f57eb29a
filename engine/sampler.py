"""From logits to the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.step import RowResult, SamplingParams, StepResult, StepRow, TokenLogprobs
from kernels.sampling import sample
from kernels.sampling_batch import GREEDY_BELOW, Sampled, SamplingBatch, TokenEdits

NOT_FINITE = "The model's output for this request was not finite, so no token could be drawn from it"
OVERFLOW = "its adapter's weights overflow on this input"
NOTHING_LEFT = "logit_bias and the banned tokens leave no token to draw."


def draw(logits: torch.Tensor, rows: Sequence[StepRow]) -> StepResult:
    """Draw the next token of each row that samples.

    A row whose logits are not finite gets an ``error``; the others do not notice it.

    Args:
        logits: [S, vocab_size], a row for each entry of ``rows`` with ``sampling``, in order.
    """
    sampling = [row for row in rows if row.sampling is not None]
    batch = build_sampling_batch(sampling, logits.device)
    return _results(sampling, logits, sample(logits, batch))


def build_sampling_batch(rows: Sequence[StepRow], device: torch.device) -> SamplingBatch:
    """The parameters of rows that all have ``sampling`` as parallel tensors."""
    params = [_params(row) for row in rows]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        # From pinned memory, since the copy must not wait for the forward pass that still runs.
        pinned = device.type == "cuda"
        return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)

    logprobs = [p.logprobs for p in params if p.logprobs is not None]
    return SamplingBatch(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        seeds=column([_signed(p.seed) for p in params], torch.int64),
        positions=column([row.start + len(row.tokens) for row in rows], torch.int64),
        edits=_edits(rows, params, device),
        num_logprobs=max(logprobs, default=None),
        all_greedy=all(p.temperature < GREEDY_BELOW for p in params),
    )


def _params(row: StepRow) -> SamplingParams:
    assert row.sampling is not None, "only rows that sample are drawn for"
    return row.sampling


def _signed(seed: int) -> int:
    """The int64 with the same 64 bits as an unsigned seed."""
    return (seed & 0xFFFFFFFFFFFFFFFF) - ((seed & 0x8000000000000000) << 1)


def _edits(
    rows: Sequence[StepRow], params: Sequence[SamplingParams], device: torch.device
) -> TokenEdits | None:
    """Bias, bans and penalties of all rows, each pair of row and token once; None if there are none."""
    entries = [_row_edits(i, row, p) for i, (row, p) in enumerate(zip(rows, params, strict=True))]
    merged = np.concatenate([entry for entry in entries if entry is not None] or [np.zeros((5, 0))], axis=1)
    if merged.shape[1] == 0:
        return None
    owner, tokens, biases, counts, seen = (torch.from_numpy(column) for column in merged)
    penalties = torch.tensor(
        [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params]
    ).to(device)
    return TokenEdits(
        rows=owner.to(device, torch.int32),
        tokens=tokens.to(device, torch.int32),
        biases=biases.to(device, torch.float32),
        counts=counts.to(device, torch.int32),
        seen=seen.to(device, torch.bool),
        presence=penalties[:, 0].contiguous(),
        frequency=penalties[:, 1].contiguous(),
        repetition=penalties[:, 2].contiguous(),
    )


def _row_edits(index: int, row: StepRow, params: SamplingParams) -> np.ndarray | None:
    """float64 [5, E]: row, token, bias, count in the output, seen."""
    biases: dict[int, float] = dict(params.logit_bias)
    biases.update(dict.fromkeys(row.banned_tokens, float("-inf")))
    output = np.zeros(0, np.int64)
    known = np.zeros(0, np.int64)
    if params.has_penalties:
        output = np.asarray(row.output_tokens, np.int64)
        prompt = row.prompt_tokens if params.repetition_penalty != 1.0 else ()
        known = np.concatenate([output, np.asarray(prompt, np.int64)])
    if not biases and not len(known):
        return None
    biased = np.fromiter(biases, np.int64, len(biases))
    tokens = np.unique(np.concatenate([known, biased]))
    entry = np.zeros((5, len(tokens)))
    entry[0], entry[1] = index, tokens
    entry[2, np.searchsorted(tokens, biased)] = list(biases.values())
    np.add.at(entry[3], np.searchsorted(tokens, output), 1)
    entry[4, np.searchsorted(tokens, known)] = 1
    return entry


def _results(rows: Sequence[StepRow], logits: torch.Tensor, sampled: Sampled) -> StepResult:
    tokens, finite = sampled.tokens.tolist(), sampled.finite.tolist()
    logprobs = _logprobs(rows, sampled)
    return StepResult(
        tuple(
            RowResult(row.seq_id, tokens[i], logprobs[i])
            if finite[i]
            else RowResult(row.seq_id, tokens[i], error=_fault(row, logits[i]))
            for i, row in enumerate(rows)
        )
    )


def _fault(row: StepRow, logits: torch.Tensor) -> str:
    """Why no token could be drawn from a row."""
    if bool(logits.max().isfinite()):
        return NOTHING_LEFT
    return f"{NOT_FINITE}." if row.adapter is None else f"{NOT_FINITE}: {OVERFLOW}."


def _logprobs(rows: Sequence[StepRow], sampled: Sampled) -> list[TokenLogprobs | None]:
    """Each row's own number of alternatives: the batch computed the most that any asked for."""
    if sampled.logprobs is None or sampled.top_tokens is None or sampled.top_logprobs is None:
        return [None] * len(rows)
    chosen = sampled.logprobs.tolist()
    top_tokens, top_logprobs = sampled.top_tokens.tolist(), sampled.top_logprobs.tolist()
    found: list[TokenLogprobs | None] = []
    for i, row in enumerate(rows):
        count = _params(row).logprobs
        found.append(
            None
            if count is None
            else TokenLogprobs(chosen[i], tuple(top_tokens[i][:count]), tuple(top_logprobs[i][:count]))
        )
    return found
