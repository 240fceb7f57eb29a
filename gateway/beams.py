"""Beam search: of all answers that were looked at, the most likely as wholes.

The rules are those of transformers' `generate(num_beams=…)`, so that both find the same answers. In each step
every beam is continued by its most likely tokens, and of all these candidates the best go on. One that ends
is kept as an answer, if it is among the best as many as there are beams.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from protos.engine_pb2 import TokenLogprobs


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search.

    `length_penalty`: an answer's score is the sum of its logprobs divided by its length to this power.
    `early_stopping`: end as soon as there are as many answers as beams; or when no beam can be expected to
    beat them (False), or none possibly can ("never").
    """

    width: int
    max_tokens: int
    end_tokens: Collection[int]
    length_penalty: float
    early_stopping: bool | Literal["never"]

    @property
    def num_candidates(self) -> int:
        """So many continuations of a step are looked at; if all end tokens are among them, enough go on."""
        return max(2, 1 + len(self.end_tokens)) * self.width


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens after a prompt, what is known of each, and the sum of their logprobs."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    sum_logprobs: float = 0.0

    def extended(self, token: int, logprob: float, top: TokenLogprobs) -> Beam:
        """Returns this with one more token; `top` is what could have stood there."""
        told = TokenLogprobs(chosen=logprob, top_tokens=top.top_tokens, top_logprobs=top.top_logprobs)
        return Beam((*self.tokens, token), (*self.logprobs, told), self.sum_logprobs + logprob)


class BeamSearch:
    """The search after one prompt. `advance` it until `beams` is empty; `answers` are then what was found."""

    def __init__(self, options: BeamOptions) -> None:
        self._options = options
        self._found: list[tuple[float, Beam]] = []  # the best first
        self._improvable = True
        self.beams: Sequence[Beam] = (Beam(),)
        """Those that go on; the best first."""

    @property
    def answers(self) -> list[Beam]:
        """What has been found so far, the best first."""
        return [beam for _, beam in self._found]

    def advance(self, tops: Sequence[TokenLogprobs]) -> None:
        """Takes one step. `tops[i]` has the `num_candidates` most likely tokens after `beams[i]`."""
        options = self._options
        candidates = [
            (beam.sum_logprobs + logprob, beam, token, logprob, top)
            for beam, top in zip(self.beams, tops, strict=True)
            for token, logprob in zip(top.top_tokens, top.top_logprobs, strict=True)
        ]
        best = heapq.nlargest(options.num_candidates, candidates, key=lambda candidate: candidate[0])
        extended = [beam.extended(token, logprob, top) for _, beam, token, logprob, top in best]
        self._keep([beam for beam in extended[: options.width] if self._ends(beam)])
        going_on = [beam for beam in extended if not self._ends(beam)][: options.width]
        is_done = options.early_stopping is True and len(self._found) == options.width
        self._improvable = bool(going_on) and self._improvable and self._may_improve(going_on[0])
        self.beams = going_on if self._improvable and not is_done else ()

    def _ends(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self._options.end_tokens or len(beam.tokens) >= self._options.max_tokens

    def _keep(self, ended: Sequence[Beam]) -> None:
        """Takes in beams that have ended; as many as there are beams stay, the best."""
        new = [(beam.sum_logprobs / self._length(len(beam.tokens)), beam) for beam in ended]
        ranked = sorted([*self._found, *new], key=lambda scored: -scored[0])
        self._found = ranked[: self._options.width]

    def _may_improve(self, best: Beam) -> bool:
        """Whether the best beam may yet beat the worst answer, as far as that is reckoned with."""
        options = self._options
        if len(self._found) < options.width:
            return True
        far = options.early_stopping == "never" and options.length_penalty > 0
        length = options.max_tokens if far else len(best.tokens)
        return best.sum_logprobs / self._length(length) > self._found[-1][0]

    def _length(self, count: int) -> float:
        return count**self._options.length_penalty
