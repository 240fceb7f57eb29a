"""How many tokens of prompts a step has, beside those that decode.

A step takes as long as what is in it, and everyone in it waits for its end. So where most of the sequences
that could run have a token to decode, prompts have to keep within two bounds:

- *Their part of the work.* On a GPU a step of decodes mostly reads weights, and some prompt tokens ride along
  for little; beyond that, each costs its full price (H200: 14 µs each of 256 beside 32 decodes, 22 µs each of
  2,048 alone). So a step takes one in so many of the prompt tokens that it could, and no fewer than ride
  cheaply: a few prompts are spread over decode steps, many at once still fill whole steps. On a CPU a token
  costs the same in any company, so there is no such bound.
- *Others' patience.* With several tenants here, prompts may lengthen a step by no more than `LENGTHENING` of
  what its decodes take: whoever comes waits for the step under way, and whoever decodes waits for every
  step. What decodes and prompts take is measured, so that this holds on any machine.

Where most wait for their prompts there is no bound, since it would cost throughput: their first tokens are
what the step is for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from engine.block_pool import BLOCK_SIZE

LENGTHENING = 2 / 3
"""By how much of the time of its decodes prompts may lengthen a step that several tenants share."""
UNMEASURED_PARTS = 24
"""Until it is known what tokens take, a shared step has this part of its budget for prompts."""
WINDOW = 64
"""The steps that measurements are from."""
FIT_EVERY = 8
"""Steps from one look at the measurements to the next."""


class PromptBudget:
    """The two bounds, and the times of recent steps.

    Args:
        most: tokens that a step has in all.
        parts, floor: a step takes one in ``parts`` of the prompt tokens that it could, and up to ``floor``
            anyway.
    """

    def __init__(self, most: int, *, parts: int, floor: int) -> None:
        self._most = most
        self._parts = parts
        self._floor = floor
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._since_fit = 0
        self._token_s: float | None = None
        self._decodes_s = 0.0

    def note(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step has taken so long. Those without decodes say nothing about what decodes have to wait for."""
        if not num_decodes:
            return
        self._times.append((num_prompt_tokens, seconds))
        self._since_fit += 1
        if self._since_fit >= FIT_EVERY and len(self._times) >= WINDOW // 2:
            self._since_fit = 0
            self._fit()

    def beside_decodes(self, num_available: int, *, is_shared: bool) -> int:
        """How many prompt tokens a step may have in which most sequences decode: one block at least.

        Args:
            num_available: prompt tokens that it could compute.
            is_shared: whether several tenants are here.
        """
        budget = min(self._most, max(self._floor, -(-num_available // self._parts)))
        if is_shared:
            budget = min(budget, self._within_patience())
        return max(BLOCK_SIZE, budget)

    def _within_patience(self) -> int:
        if self._token_s is None:
            return self._most // UNMEASURED_PARTS
        return int(LENGTHENING * self._decodes_s / self._token_s)

    def _fit(self) -> None:
        """Draws a line through the times: between the half of the steps with the fewest prompt tokens and the
        eighth with the most, by their medians.

        Medians, because a step that something else held up must not count. If all steps were of about one
        size, what a token takes stays as it was found last.
        """
        by_size = sorted(self._times)
        few, few_s = _medians(by_size[: len(by_size) // 2])
        many, many_s = _medians(by_size[-len(by_size) // 8 :])
        if many - few >= BLOCK_SIZE and many_s > few_s:
            self._token_s = (many_s - few_s) / (many - few)
        if self._token_s is not None:
            token_s = self._token_s
            self._decodes_s = max(0.0, median(seconds - tokens * token_s for tokens, seconds in by_size))


def _medians(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    return median(tokens for tokens, _ in times), median(seconds for _, seconds in times)
