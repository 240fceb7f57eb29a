"""Beam search: of all answers that were looked at, the most likely as wholes.

The rules are those of transformers' `generate(num_beams=…)`, so that both find the same answers. In each step
every beam is continued by its most likely tokens, and of all these candidates the best go on. One that ends
is kept as an answer, if it is among the best as many as there are beams.

Nothing here knows of blocks or steps of the device: see `engine.scheduler.searches`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from engine.step import TokenLogprobs


class EarlyStopping(IntEnum):
    """When a search ends; the numbers are the wire's."""

    OFF = 0
    """When no beam can be expected to beat the answers that there are."""
    ON = 1
    """As soon as there are as many answers as beams."""
    NEVER = 2
    """When no beam can possibly beat them."""


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search.

    Attributes:
        width: beams that go on at a time, and answers that are found.
        max_tokens: of an answer.
        end_tokens: those that end an answer.
        length_penalty: an answer's score is the sum of its logprobs divided by its length to this power.
        num_top: alternatives of each of an answer's tokens that are to be told; None: no logprobs are.
    """

    width: int
    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.OFF
    num_top: int | None = None

    @property
    def num_candidates(self) -> int:
        """So many continuations of a step are looked at; if all end tokens are among them, enough go on."""
        return max(2, 1 + len(self.end_tokens)) * self.width


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """Tokens after a prompt: one more than its parent has. What beams have in common exists once.

    Attributes:
        token: the last; -1 where there is none.
        logprobs: of the last, if they are to be told.
        sum_logprobs: over all.
        length: how many tokens there are.
    """

    parent: Beam | None = None
    token: int = -1
    logprobs: TokenLogprobs | None = None
    sum_logprobs: float = 0.0
    length: int = 0

    @property
    def path(self) -> list[Beam]:
        """The beams that it came from, and itself: one for each token."""
        found: list[Beam] = []
        beam: Beam | None = self
        while beam is not None and beam.parent is not None:
            found.append(beam)
            beam = beam.parent
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        return [beam.token for beam in self.path]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A beam with one more token, which few of them are made for."""

    score: float
    parent: Beam
    token: int
    logprob: float
    top: TokenLogprobs


class BeamSearch:
    """The search after one prompt. `advance` it until `beams` is empty; `answers` are then what was found.

    Attributes:
        beams: those that go on, the best first: as many as there are to be, but for the one before the first
            step.
    """

    def __init__(self, options: BeamOptions) -> None:
        self.options = options
        self.beams: Sequence[Beam] = (Beam(),)
        self._found: list[tuple[float, Beam]] = []  # the best first

    @property
    def answers(self) -> list[Beam]:
        """What has been found so far, the best first."""
        return [beam for _, beam in self._found]

    def advance(self, tops: Mapping[Beam, TokenLogprobs]) -> None:
        """Takes one step.

        Args:
            tops: for each of ``beams`` the `BeamOptions.num_candidates` most likely tokens after it.
        """
        options = self.options
        candidates = (
            _Candidate(beam.sum_logprobs + logprob, beam, token, logprob, tops[beam])
            for beam in self.beams
            for token, logprob in zip(tops[beam].top_tokens, tops[beam].top_logprobs, strict=True)
        )
        best = heapq.nlargest(options.num_candidates, candidates, key=lambda candidate: candidate.score)
        self._keep([self._extended(each) for each in best[: options.width] if self._ends(each)])
        going_on = [each for each in best if not self._ends(each)][: options.width]
        is_done = options.early_stopping is EarlyStopping.ON and len(self._found) == options.width
        goes_on = bool(going_on) and not is_done and self._may_improve(going_on[0])
        self.beams = [self._extended(each) for each in going_on] if goes_on else ()

    def _ends(self, candidate: _Candidate) -> bool:
        options = self.options
        return candidate.token in options.end_tokens or candidate.parent.length + 1 >= options.max_tokens

    def _extended(self, candidate: _Candidate) -> Beam:
        count, top, told = self.options.num_top, candidate.top, None
        if count is not None:
            told = TokenLogprobs(candidate.logprob, top.top_tokens[:count], top.top_logprobs[:count])
        parent = candidate.parent
        return Beam(parent, candidate.token, told, candidate.score, parent.length + 1)

    def _keep(self, ended: Sequence[Beam]) -> None:
        """Takes in beams that have ended; as many as there are beams stay, the best."""
        new = [(self._score(beam.sum_logprobs, beam.length), beam) for beam in ended]
        ranked = sorted([*self._found, *new], key=lambda scored: -scored[0])
        self._found = ranked[: self.options.width]

    def _may_improve(self, best: _Candidate) -> bool:
        """Whether the best beam may yet beat the worst answer, as far as that is reckoned with."""
        options = self.options
        if len(self._found) < options.width:
            return True
        far = options.early_stopping is EarlyStopping.NEVER and options.length_penalty > 0
        length = options.max_tokens if far else best.parent.length + 1
        return self._score(best.score, length) > self._found[-1][0]

    def _score(self, sum_logprobs: float, length: int) -> float:
        return sum_logprobs / length**self.options.length_penalty


def num_common_tokens(beams: Sequence[Beam]) -> int:
    """How many tokens beams of one length begin with that are the same in all: the same beams back there."""
    paths = [beam.path for beam in beams]
    shared = 0
    for column in zip(*paths, strict=True):
        if any(beam is not column[0] for beam in column):
            break
        shared += 1
    return shared
