"""Claims: which residents make room for an adapter that finds no pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.host_copy import HostCopy
from engine.rank_pages import RankPages
from engine.scheduler.turns import Leaving


@dataclass(frozen=True, slots=True)
class Claim:
    """An adapter that waits for pages, and whose it is to get."""

    digest: bytes
    copy: HostCopy
    victims: frozenset[bytes]
    suffices: bool
    """Whether the victims' room is enough. If not, other room is kept for sequences that have yet to run, and
    the claimant chooses anew when it is asked for next."""


def make_claim(pages: RankPages, digest: bytes, copy: HostCopy, leaving: Mapping[bytes, Leaving]) -> Claim:
    """Chooses victims: what nobody uses, then of the adapters in use those that can leave soonest, until
    their room suffices.
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
    return Claim(digest, copy, frozenset(victims), suffices=num_pages <= 0 and ends <= 0)
