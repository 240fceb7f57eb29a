"""How many tokens of prompts a step has, beside those that decode.

A step takes as long as what is in it, and everyone in it waits for its end, as does whoever comes meanwhile.
So prompts have to keep within two bounds:

- *What rides along*, where most of the sequences that could run have a token to decode and only few prompt
  tokens wait. On a GPU a step of decodes mostly reads weights, so a few tokens more lengthen it by little,
  and a whole prompt at once would hold all the others up: one of 512 tokens beside 128 decodes on an H200,
  in steps of 256 tokens, makes the longest gap between two tokens 13.5 ms, not 27. Many prompts are computed
  in whole steps all the same, since a seat that waits for its prompt costs more than is gained. On a CPU a
  token costs the same in any company, so there is no such bound.
- *Others' patience*, where several tenants are here. Prompts may lengthen a step by so much of what its
  decodes take, and by more where most wait for their prompts, since to read the weights for few tokens costs
  throughput; and by some milliseconds in any case, which nobody minds, and which keep the seats of a GPU
  taken. What decodes and prompts take is measured, so that this holds on any machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from engine.block_pool import BLOCK_SIZE

LENGTHENING = 2 / 3
"""By how much of the time of its decodes prompts may lengthen a step that several tenants share."""
PROMPTS_LENGTHENING = 4.0
"""The same where most sequences wait for their prompts."""
PATIENCE_S = 0.02
"""By how much they may lengthen such a step at least."""
FEW = 4
"""Prompts are few while so many steps of those that they are spread over would hold them."""
UNMEASURED = 1 / 16
"""Until it is known what tokens take: what part of a step's budget takes as long as its decodes."""
WINDOW = 64
"""The steps that measurements are from."""
FIT_EVERY = 8
"""Steps from one look at the measurements to the next."""


class PromptBudget:
    """The two bounds, and the times of recent steps.

    Args:
        most: tokens that a step has in all.
        spread: tokens in all of the steps that few prompts are spread over; 0: they are not.
    """

    def __init__(self, most: int, *, spread: int) -> None:
        self._most = most
        self._spread = spread
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

    def of_step(self, num_decodes: int, num_available: int, *, most_decode: bool, is_shared: bool) -> int:
        """How many prompt tokens a step may have: one block at least.

        Args:
            num_available: prompt tokens that it could compute.
            most_decode: whether most of the sequences that could run have a token to decode.
            is_shared: whether several tenants are here.
        """
        budget = self._most
        if most_decode and self._spread and num_available <= FEW * self._spread:
            budget = min(budget, self._spread - num_decodes)
        if is_shared:
            lengthening = LENGTHENING if most_decode else PROMPTS_LENGTHENING
            budget = min(budget, int(max(lengthening * self._as_long_as_decodes(), self._patience())))
        return max(BLOCK_SIZE, budget)

    def _patience(self) -> float:
        """How many prompt tokens take `PATIENCE_S`; 0 while that is not known."""
        return 0.0 if self._token_s is None else PATIENCE_S / self._token_s

    def _as_long_as_decodes(self) -> float:
        """How many prompt tokens take as long as the decodes of a step."""
        if self._token_s is None:
            return UNMEASURED * self._most
        return self._decodes_s / self._token_s

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
