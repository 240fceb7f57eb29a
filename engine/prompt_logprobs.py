"""Logprobs of prompts: what the model thought of each token before it was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from engine.step import PromptScoring, StepRow, TokenLogprobs
from engine.transfer import Readback, to_device

_MOST_LOGITS = 1 << 24
"""Logits that are held at once, beside those that are drawn from: 64 MiB of them, however large the step."""

LogitsOf = Callable[[int, int], torch.Tensor]
"""The logits [stop - start, V] of the scored tokens from ``start`` to ``stop``."""


class PendingScores:
    """The logprobs of the prompts of one step, launched, and on their way to the host.

    Args:
        rows: those of the step that have a scoring.
        logits_of: for their scored tokens, one row after another.
        vocab_size: at least the number of logits that a token has, to bound their memory by.
    """

    def __init__(
        self, rows: Sequence[StepRow], logits_of: LogitsOf, vocab_size: int, readback: Readback
    ) -> None:
        self._rows = rows
        scorings = [_scoring(row) for row in rows]
        tokens = np.concatenate([np.array(scoring.tokens, np.int64) for scoring in scorings])
        num_top = max(scoring.num_top for scoring in scorings)
        width = max(1, _MOST_LOGITS // vocab_size)
        parts = [
            _score(logits_of(at, min(at + width, len(tokens))), tokens[at : at + width], num_top)
            for at in range(0, len(tokens), width)
        ]
        self._copies = readback.start([torch.cat(column) for column in zip(*parts, strict=True)])

    def result(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """By sequence; waits for the device."""
        chosen, top_tokens, top_logprobs = (column.tolist() for column in self._copies.wait())
        counts = [len(_scoring(row).tokens) for row in self._rows]
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for row, count, end in zip(self._rows, counts, accumulate(counts), strict=True):
            num_top = _scoring(row).num_top
            found[row.seq_id] = tuple(
                TokenLogprobs(chosen[i], tuple(top_tokens[i][:num_top]), tuple(top_logprobs[i][:num_top]))
                for i in range(end - count, end)
            )
        return found


def _score(logits: torch.Tensor, tokens: np.ndarray, num_top: int) -> tuple[torch.Tensor, ...]:
    """For each row of ``logits`` [N, V] the logprob of its token, and the most likely ones with theirs."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, to_device(tokens, logits.device)[:, None])[:, 0]
    top = logprobs.topk(num_top, dim=-1)
    return chosen, top.indices, top.values


def _scoring(row: StepRow) -> PromptScoring:
    assert row.scoring is not None, "only rows with a scoring are scored"
    return row.scoring
