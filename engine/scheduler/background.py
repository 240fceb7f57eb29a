"""Background work: what runs in what all others leave over, whoever sends it.

Each tenant's is an account of its own, behind all that are not: it is admitted when nobody else could be,
and gives back its seat, blocks and pages as soon as somebody else lacks them, without waiting for the end of
a turn. Among themselves, such accounts are as fair as the others. What has been computed usually stays in the
prefix cache meanwhile, so that to come back costs little.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from engine.scheduler.block_tables import blocks_for
from engine.sequence import Sequence

_SUFFIX = "\0background"
"""No tenant's id has a zero byte."""


def account_name(tenant: str, *, background: bool) -> str:
    """Whose service a request counts as."""
    return tenant + _SUFFIX if background else tenant


def is_background(account: str) -> bool:
    """Whether an account is one of background work."""
    return account.endswith(_SUFFIX)


def who_gives_way(
    running: list[Sequence], waiting: Iterable[Sequence], *, free_seats: int, free_blocks: int, most: int
) -> list[Sequence]:
    """The sequences of background work that make room for those of others who wait, the last admitted first.

    Args:
        running: in the order of admission.
        waiting: in any order; those whose adapter is here, and lets them start.
        free_blocks: those that may be given to who starts.
        most: seats that there are in all.
    """
    workers = [seq for seq in running if is_background(seq.request.tenant) and seq.leads]
    if not workers:
        return []
    others = list(islice((seq for seq in waiting if not is_background(seq.request.tenant)), most))
    seats = min(most, sum(seq.num_seats for seq in others)) - free_seats
    blocks = sum(blocks_for(len(seq.tokens)) for seq in others) - free_blocks
    yielding: list[Sequence] = []
    while others and workers and (seats > 0 or blocks > 0):
        seq = workers.pop()
        yielding.append(seq)
        seats -= seq.num_seats
        blocks -= seq.num_blocks
    return yielding
