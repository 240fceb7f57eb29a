"""The best of several answers to one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")


def best_choices(
    choices: Sequence[Choice], mean_logprobs: Sequence[float], *, of: int, keep: int
) -> list[Choice]:
    """Returns the `keep` most likely of each `of` choices, which belong to one prompt, the best first.

    What counts is the mean over an answer's tokens, so that a long one is not worse for its length. Of equal
    ones the earlier is better.
    """
    kept: list[Choice] = []
    for first in range(0, len(choices), of):
        own = sorted(range(first, first + of), key=lambda choice: -mean_logprobs[choice])
        kept += [choices[choice] for choice in own[:keep]]
    return kept
