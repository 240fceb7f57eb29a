"""From a sequence to its row of a step."""

from __future__ import annotations

from engine.sequence import Sequence
from engine.step import UNSEEN, PromptScoring, StepRow

_UNSEEN = (UNSEEN,)


def make_row(seq: Sequence, count: int) -> StepRow:
    """The next ``count`` tokens of a running sequence. A row that reaches its end draws a token.

    The row names the sequence's own block table, which only grows while the sequence runs. A token that the
    host has not read yet is the row's only one, since it was drawn where all before it was computed.
    """
    start = seq.num_computed
    end = start + count
    tokens, request = seq.tokens, seq.request
    scoring = None if request.prompt_logprobs is None else _scoring(seq, start, end, request.prompt_logprobs)
    if end < len(tokens) + seq.num_unseen:
        return StepRow(
            seq.seq_id,
            tokens[start:end],
            start,
            seq.block_ids,
            seq.adapter,
            request.adapter_start,
            scoring=scoring,
            pooling=request.pooling,
        )
    params = seq.params
    penalized = params.has_penalties
    return StepRow(
        seq.seq_id,
        tokens[start:] or _UNSEEN,
        start,
        seq.block_ids,
        seq.adapter,
        request.adapter_start,
        params,
        request.prompt if penalized else (),
        tokens[seq.num_prompt :] if penalized else (),
        request.banned_before_min if seq.num_output + seq.num_unseen < request.min_tokens else (),
        seq.constraint,
        scoring,
        request.pooling,
    )


def _scoring(seq: Sequence, start: int, end: int, num_top: int) -> PromptScoring | None:
    """Those of the prompt's tokens after ``start``, and up to ``end``, whose logprobs have not been told."""
    first = max(start + 1, seq.num_scored)
    tokens = seq.tokens[first : min(end + 1, seq.num_prompt)]
    return PromptScoring(first - 1 - start, tokens, num_top) if tokens else None
