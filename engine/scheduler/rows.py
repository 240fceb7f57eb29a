"""From a sequence to its row of a step."""

from __future__ import annotations

from engine.sequence import Sequence
from engine.step import StepRow


def make_row(seq: Sequence, count: int) -> StepRow:
    """The next ``count`` tokens of a running sequence. A row that reaches its end draws a token.

    The row names the sequence's own block table, which only grows while the sequence runs.
    """
    start = seq.num_computed
    end = start + count
    tokens = seq.tokens
    if end < len(tokens):
        return StepRow(seq.seq_id, tokens[start:end], start, seq.block_ids, seq.adapter)
    params, request = seq.params, seq.request
    penalized = params.has_penalties
    return StepRow(
        seq.seq_id,
        tokens[start:],
        start,
        seq.block_ids,
        seq.adapter,
        0,
        params,
        request.prompt if penalized else (),
        tokens[seq.num_prompt :] if penalized else (),
        request.banned_before_min if seq.num_output < request.min_tokens else (),
    )
