"""The bounds of steps and of the queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of a step and of the queue.

    Raises:
        ValueError: when a step could not hold one token of every running sequence.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 4096
    spread_prompts: int = 0
    """Beside decodes, few prompts are spread over steps of so many tokens in all; 0: none are."""

    def __post_init__(self) -> None:
        if not 0 < self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}): every running sequence takes a token of each step"
            )

    @property
    def max_choices(self) -> int:
        """Most choices of one request: all of them wait, in an idle engine too, before they run together."""
        return min(self.max_num_seqs, self.max_num_waiting)
