"""Turns: when a running sequence has used its adapter's pages for long enough to let others have them.

With more adapters in use than there is room for, some of them wait. If they waited until a running sequence
ends, a long answer would keep them from their first token for minutes. So adapters take turns, as processes
do on a processor: a sequence that has had its turn yields when another adapter claims its pages. Its blocks
usually stay in the prefix cache, so that coming back costs no more than the tokens of one block. A turn is
long enough to be worth that, and longer for long contexts, which cost more when they have been displaced.
Without a prefix cache all of the context is computed again, and few answers are long enough for a second
turn.

Between tenants, those yield who were served no less than the tenant that claims: so a flood of one tenant's
adapters does not take turns away from others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.sequence import Sequence

LEAST_TURN = 32
"""Tokens that a sequence generates before it yields: many times what it costs to swap an adapter."""
TOKENS_PER_CACHED = 1 / 16
"""How many it also generates for each token of its context that is probably cached."""
TOKENS_PER_RECOMPUTED = 4
"""How many for each that would be computed again."""


def left_of_turn(seq: Sequence, *, is_cached: bool) -> int:
    """Tokens that a running sequence will generate before it yields; negative when its turn is over."""
    share = TOKENS_PER_CACHED if is_cached else TOKENS_PER_RECOMPUTED
    turn = max(LEAST_TURN, int(seq.num_computed * share))
    return turn - (len(seq.tokens) + seq.num_unseen - seq.num_at_start)


def steps_to_leave(
    running: Iterable[Sequence], yields: Callable[[Sequence], bool], *, is_cached: bool
) -> dict[bytes, int]:
    """By adapter, after how many steps all its running sequences can have left it, given a row in each.

    Args:
        yields: whether a sequence has to, after its turn; others go on to their end.
        is_cached: whether what a sequence has computed stays in the prefix cache when it yields.
    """
    steps: dict[bytes, int] = {}
    for seq in running:
        digest = seq.request.adapter_digest
        if digest:
            left = seq.request.max_len - seq.num_computed
            if yields(seq):
                left = min(left, left_of_turn(seq, is_cached=is_cached))
            steps[digest] = max(steps.get(digest, left), left)
    return steps
