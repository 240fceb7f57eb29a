"""From logits to the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.drawn_tokens import DrawnTokens
from engine.step import RowResult, SamplingParams, StepResult, StepRow, TokenLogprobs
from engine.token_edits import EditLists
from engine.transfer import Readback, pack_to_device, to_device
from kernels.sampling import sample
from kernels.sampling_batch import GREEDY_BELOW, AllowedTokens, Sampled, SamplingBatch

NOT_FINITE = "The model's output for this request was not finite, so no token could be drawn from it"
OVERFLOW = "its adapter's weights overflow on this input"
NOTHING_LEFT = "logit_bias and the banned tokens leave no token to draw."


class PendingDraw:
    """The draw of one step, launched, and on its way to the host."""

    def __init__(
        self, rows: Sequence[StepRow], logits: torch.Tensor, sampled: Sampled, readback: Readback
    ) -> None:
        parts = [sampled.tokens, sampled.finite]
        if sampled.logprobs is not None:
            assert sampled.top_tokens is not None and sampled.top_logprobs is not None
            parts += [sampled.logprobs, sampled.top_tokens, sampled.top_logprobs]
        self._rows = rows
        self._logits = logits
        self._copies = readback.start(parts)

    def result(self) -> StepResult:
        """What each row drew, once the device has.

        A row whose logits are not finite gets an ``error``; the others do not notice it.
        """
        return _results(self._rows, self._logits, Sampled(*self._copies.wait()))


class Sampler:
    """Launches the draws of one engine's steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readback = Readback(device)
        self._edits = EditLists(device)
        self._columns = _columns_of([])

    def draw(
        self, logits: torch.Tensor, rows: Sequence[StepRow], drawn: DrawnTokens | None = None
    ) -> tuple[PendingDraw, DrawnTokens]:
        """Launch the draw of the next token of each row.

        Args:
            logits: [S, vocab_size], a row for each of ``rows``, which all have ``sampling``.
            drawn: what the step before has drawn, for penalties on tokens that no host has seen.

        Returns:
            The draw on its way to the host, and on the device, for the next step.
        """
        sampled = sample(logits, self.batch(rows, drawn))
        return PendingDraw(rows, logits, sampled, self._readback), DrawnTokens(sampled.tokens, rows)

    def batch(self, rows: Sequence[StepRow], drawn: DrawnTokens | None = None) -> SamplingBatch:
        """The parameters of rows that all have ``sampling`` as parallel tensors. Waits for nothing."""
        params = [_params(row) for row in rows]
        if params != self._columns.params:  # mostly the very rows of the step before
            self._columns = _columns_of(params)
        columns = self._columns
        positions = np.array([row.start + len(row.tokens) for row in rows], np.int64)
        edited = [i for i, row in enumerate(rows) if columns.are_edited[i] or row.banned_tokens]
        return SamplingBatch(
            **pack_to_device({**columns.arrays, "positions": positions}, self._device),
            edits=self._edits.build(rows, edited, drawn),
            allowed=_allowed(rows, self._device),
            num_logprobs=columns.num_logprobs,
            all_greedy=columns.all_greedy,
        )


def _allowed(rows: Sequence[StepRow], device: torch.device) -> AllowedTokens | None:
    """What the rows that have a constraint may draw. On a GPU it is found while the step computes.

    Their states have all tokens so far: see `engine.launched_step.LaunchedStep.draw`.
    """
    constraints = [row.constraint for row in rows if row.constraint is not None]
    if not constraints:
        return None
    bits = np.empty((len(constraints), constraints[0].num_words), np.int32)
    for words, constraint in zip(bits, constraints, strict=True):
        constraint.write_allowed(words)
    lists, numbers = np.full(len(rows), -1, np.int32), iter(range(len(constraints)))
    for i, row in enumerate(rows):
        if row.constraint is not None:
            lists[i] = next(numbers)
    return AllowedTokens(to_device(lists, device), to_device(bits, device))


@dataclass(frozen=True, slots=True)
class _Columns:
    """What depends on the rows' parameters alone."""

    params: list[SamplingParams]
    arrays: dict[str, np.ndarray]
    are_edited: list[bool]
    num_logprobs: int | None
    all_greedy: bool


def _columns_of(params: list[SamplingParams]) -> _Columns:
    return _Columns(
        params=params,
        arrays={
            "temperature": np.array([p.temperature for p in params], np.float32),
            "top_k": np.array([p.top_k for p in params], np.int32),
            "top_p": np.array([p.top_p for p in params], np.float32),
            "min_p": np.array([p.min_p for p in params], np.float32),
            "seeds": np.array([_signed(p.seed) for p in params], np.int64),
        },
        are_edited=[p.has_penalties or bool(p.logit_bias) for p in params],
        num_logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
        all_greedy=all(p.temperature < GREEDY_BELOW for p in params),
    )


def _params(row: StepRow) -> SamplingParams:
    assert row.sampling is not None, "only rows that sample are drawn for"
    return row.sampling


def _signed(seed: int) -> int:
    """The int64 with the same 64 bits as an unsigned seed."""
    return (seed & 0xFFFFFFFFFFFFFFFF) - ((seed & 0x8000000000000000) << 1)


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
    if row.constraint is not None and row.constraint.fault:
        return f"The answer's grammar failed: {row.constraint.fault}."
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
