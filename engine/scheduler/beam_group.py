"""One beam search in the scheduler: which sequence has which beam."""

from __future__ import annotations

from engine.beams import Beam, BeamSearch, num_common_tokens
from engine.block_pool import BLOCK_SIZE
from engine.sequence import Request, Sequence
from engine.step import TokenLogprobs


class BeamGroup:
    """The sequences of a search: *seats*, as many as beams. All of them run, or none but the first::

        first seat computes what all beams begin with ──spread──▶ a beam in each seat ─┐
           ▲                                                            │      ▲      advance
           └───────────────────────── gather ◀──────────────────────────┘      └───────┘

    Seats come and go together: where some held blocks while others wait for theirs, two searches could wait
    for each other. Beams outlive a preemption; their keys and values are computed again.

    Attributes:
        seats: one for each choice, in that order. Which beam is in which says nothing of the answers' order.
        search: the beams, and what has been found.
        running: the seats while each has a beam; empty while the first leads.
        beams_of: the beam in each of them.
        tops: by beam, the candidates after it that have come since the last step of the search.
    """

    __slots__ = ("beams_of", "running", "search", "seats", "tops")

    def __init__(self, request: Request, seats: list[Sequence]) -> None:
        assert request.beams is not None and len(seats) == request.beams.width
        self.seats = seats
        self.search = BeamSearch(request.beams)
        self.running: list[Sequence] = []
        self.beams_of: dict[Sequence, Beam] = {}
        self.tops: dict[Beam, TokenLogprobs] = {}

    @property
    def has_begun(self) -> bool:
        """Whether a step of the search has been taken; before, its only beam is empty."""
        return self.search.beams[0].length > 0

    def spread(self) -> None:
        """Each seat gets a beam; their tables have been made from the first's. What a beam has beyond that is
        known, and no part of the turn that begins.
        """
        self.running = self.seats
        self.beams_of = dict(zip(self.seats, self.search.beams, strict=True))
        for seat, beam in self.beams_of.items():
            seat.tokens[seat.num_prompt :] = beam.tokens
            seat.num_at_start = len(seat.tokens)

    def gather(self) -> None:
        """The seats have given back what they held: the first leads again, from what all beams begin with."""
        leader, *others = self.seats
        if self.running:
            beams = self.search.beams
            known = leader.num_prompt + min(num_common_tokens(beams), beams[0].length - 1)
            del leader.tokens[known:], leader.block_hashes[known // BLOCK_SIZE :]
            leader.siblings = others
        self.running = []
        self.beams_of = {}
        self.tops = {}
