"""Turns: when a running sequence has used its adapter's pages for long enough to let others have them.

With more adapters in use than there is room for, some of them wait. If they waited until a running sequence
ends, a long answer would keep them from their first token for minutes. So adapters take turns, as processes
do on a processor: a sequence that has had its turn yields when another adapter claims its pages. Its blocks
usually stay in the prefix cache, so that coming back costs no more than the tokens of one block; a turn is
long enough to be worth that, and long contexts, which would cost more if they had been displaced, have
longer turns.

Between tenants, those yield who were served no less than the tenant that claims: so a flood of one tenant's
adapters does not take turns away from others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.sequence import Sequence

LEAST_TURN = 32
"""Tokens that a sequence generates before it yields: some fifty times what it costs to swap an adapter."""
CONTEXT_SHARE = 16
"""A sequence also generates a token for each so many of its context."""


def left_of_turn(seq: Sequence) -> int:
    """Tokens that a running sequence will generate before it yields; negative when its turn is over."""
    turn = max(LEAST_TURN, seq.num_computed // CONTEXT_SHARE)
    return turn - (len(seq.tokens) + seq.num_unseen - seq.num_at_start)


def steps_to_leave(running: Iterable[Sequence], yields: Callable[[Sequence], bool]) -> dict[bytes, int]:
    """By adapter, after how many steps all its running sequences can have left it, given a row in each.

    Args:
        yields: whether a sequence has to, after its turn; others go on to their end.
    """
    steps: dict[bytes, int] = {}
    for seq in running:
        digest = seq.request.adapter_digest
        if digest:
            left = seq.request.max_len - seq.num_computed
            if yields(seq):
                left = min(left, left_of_turn(seq))
            steps[digest] = max(steps.get(digest, left), left)
    return steps
