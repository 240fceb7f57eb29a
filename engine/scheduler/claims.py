"""Claims: which residents make room for an adapter that finds no pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.host_copy import HostCopy
from engine.rank_pages import RankPages
from engine.scheduler.turns import Leaving

GRACE_STEPS = 8
"""A claim may wait for so many steps more, so that sequences of a victim that end by then can start beside
those that it has to wait for anyway."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An adapter that waits for pages, and whose it is to get."""

    digest: bytes
    copy: HostCopy
    victims: frozenset[bytes]
    suffices: bool
    """Whether the victims' room is enough. If not, other room is kept for sequences that have yet to run, and
    the claimant chooses anew when it is asked for next."""
    leave_by: Mapping[bytes, int]
    """By victim that is in use, the step by which it can have left, and `GRACE_STEPS` more."""

    def lets_start(self, digest: bytes, *, end: int) -> bool:
        """Whether one more sequence of an adapter may start that ends by the step ``end``."""
        return digest not in self.victims or end <= self.leave_by.get(digest, 0)


def make_claim(
    pages: RankPages,
    digest: bytes,
    copy: HostCopy,
    leaving: Mapping[bytes, Leaving],
    *,
    step: int,
    before: Claim | None = None,
) -> Claim:
    """Chooses victims: what nobody uses, then of the adapters in use those that can leave soonest, until
    their room suffices.

    Args:
        step: the number of the step that is being planned.
        before: the claim that this one is in place of; it does not put off when its victims leave.
    """
    num_pages, ends = pages.lacking(copy)
    victims = pages.evictable(copy)
    for victim in sorted(leaving, key=lambda other: leaving[other].rank):
        if num_pages <= 0 and ends <= 0:
            break
        room = pages.room_of(victim)
        if pages.may_go(victim, copy) and (num_pages > 0 or room.ends_bytes):
            victims.add(victim)
            num_pages -= room.pages
            ends -= room.ends_bytes
    in_use = victims & leaving.keys()
    leave_by = {victim: step + max(0, leaving[victim].steps) + GRACE_STEPS for victim in in_use}
    if before is not None:
        leave_by |= {victim: by for victim, by in before.leave_by.items() if victim in in_use}
    return Claim(digest, copy, frozenset(victims), num_pages <= 0 and ends <= 0, leave_by)
