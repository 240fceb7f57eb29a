"""Beam searches: what becomes of the beams of a request when their candidates are known.

A search is one request with a sequence for each beam. They share the blocks of what they have in common; the
last, partial one is copied by whoever writes to it next, unless nobody shares it any more. So a step costs
one row for each beam, and blocks are held once for each token that is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.beams import Beam
from engine.scheduler.beam_group import BeamGroup
from engine.scheduler.lives import Lives
from engine.sequence import FinishReason, Sequence, Status
from engine.step import RowResult, TokenLogprobs


class Searches:
    """Moves searches on. What their sequences hold, `Lives` and its tables change."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives

    def take(self, seq: Sequence, outcome: RowResult) -> None:
        """Takes in the candidates after a beam. With those after the last of them the search takes a step.

        What a row has found whose search was preempted meanwhile is found again, once that runs again.
        """
        group = seq.search
        assert group is not None and outcome.seq_id == seq.seq_id
        if seq.status is not Status.RUNNING:
            return
        assert outcome.logprobs is not None, "a search asks for candidates"
        if group.running:
            self._note(group, group.beams_of[seq], outcome.logprobs)
        elif group.has_begun:
            self._spread(group)
        else:
            self._note(group, group.search.beams[0], outcome.logprobs)

    def check(self, running: Iterable[Sequence]) -> None:
        """Asserts that each search runs as a whole and in one place, and each beam in a seat of its own."""
        running = list(running)
        for place, seq in enumerate(running):
            group = seq.search
            if group is None or not seq.leads:
                continue
            if not group.running:
                assert seq.siblings == group.seats[1:], "a beam is lost"
                continue
            assert running[place : place + len(group.seats)] == group.seats, "a search is torn apart"
            assert group.beams_of.keys() == set(group.seats)
            assert set(group.beams_of.values()) == set(group.search.beams)
            for seat, beam in group.beams_of.items():
                assert seat.tokens == [*seat.request.prompt, *beam.tokens], "not the beam's tokens"

    def _note(self, group: BeamGroup, beam: Beam, top: TokenLogprobs) -> None:
        group.tops[beam] = top
        if len(group.tops) == len(group.search.beams):
            self._advance(group)

    def _advance(self, group: BeamGroup) -> None:
        request = group.seats[0].request
        tops, group.tops = group.tops, {}
        self._lives.counters.charge_output(request.tenant, len(tops))
        self._lives.outputs.searched(request, len(group.seats))
        group.search.advance(tops)
        if not group.search.beams:
            self._finish(group)
        elif group.running:
            self._move(group)
        else:
            self._spread(group)

    def _spread(self, group: BeamGroup) -> None:
        """Lets all beams run from what the first seat has computed, which they all begin with."""
        self._lives.fork_beams(group.seats[0])
        group.spread()

    def _move(self, group: BeamGroup) -> None:
        """Puts the new beams into the seats. The first child of each stays where its parent was; the others
        take the seats of those without children, whose blocks go back.
        """
        children = group.search.beams
        seat_of = {beam: seat for seat, beam in group.beams_of.items()}
        first_of: dict[Beam | None, Beam] = {}
        for child in children:
            first_of.setdefault(child.parent, child)
        placed = {seat: first_of[beam] for seat, beam in group.beams_of.items() if beam in first_of}
        free = [seat for seat in group.seats if seat not in placed]
        others = [child for child in children if first_of[child.parent] is not child]
        for seat, child in zip(free, others, strict=True):
            assert child.parent is not None, "only the search's first beam has none"
            parent = seat_of[child.parent]
            self._lives.tables.branch(parent, seat)
            seat.tokens[seat.num_prompt :] = parent.tokens[parent.num_prompt :]
            placed[seat] = child
        for seat, child in placed.items():
            seat.tokens.append(child.token)
        group.beams_of = placed

    def _finish(self, group: BeamGroup) -> None:
        """Tells all answers, the best first, and ends the choices: the first last, so that none succeeds."""
        lives, options = self._lives, group.search.options
        answers = list(zip(group.seats, group.search.answers, strict=True))
        for seat, answer in answers:
            path = answer.path
            lives.outputs.answer(seat, [beam.token for beam in path], [beam.logprobs for beam in path])
        for seat, answer in reversed(answers):
            is_end = answer.token in options.end_tokens
            lives.end(seat, FinishReason.STOP if is_end else FinishReason.LENGTH)
