"""What the scheduler hands the runner for one step, and what comes back.

Plain values, immutable, rebuilt every step: nothing about which row has which adapter outlives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from engine.constraints import Constraint

UNSEEN = -1
"""Stands for a token that was drawn on the device in the step before, and that the host has not read yet."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence's next token is drawn. Mirrors ``Sampling`` of the wire; off values are explicit.

    The noise of a draw depends on ``(seed, position, token)`` alone, so a sequence continues elsewhere with
    the same text.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    seed: int = 0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class StepAdapter:
    """An adapter for the length of one step: which pages of the pool it owns."""

    adapter_id: int
    """Never reused while the process lives; 0, the base model, does not appear here."""
    pages: tuple[int, ...]
    rank: int
    has_vectors: bool = False
    """Whether it scales or shifts outputs (DoRA, ``lora_bias``), by the vectors in its last page."""
    has_ends: bool = False
    """Whether it changes the embedding or ``lm_head``, by weights outside its pages."""
    vocab_size: int = 0
    """Tokens that it can read and draw; 0: those of the base model."""


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Which tokens of a prompt are to be given their logprobs by a row that computes those before them."""

    first: int
    """Index among the row's tokens of the one before the first of these."""
    tokens: Sequence[int]
    """Of the prompt; the last may be the one after the row's own."""
    num_top: int
    """Alternatives for each."""


class Pooling(IntEnum):
    """Of which tokens of a prompt the final hidden states make its vector; the numbers are the wire's."""

    LAST = 1
    MEAN = 2


@dataclass(slots=True)
class StepRow:
    """One sequence's part of a step: ``len(tokens)`` tokens from position ``start`` on.

    Never changed once made. It is not frozen because one is made for every sequence in every step, and a
    frozen dataclass of this size takes seven times as long to make.
    """

    seq_id: int
    tokens: Sequence[int]
    """``(UNSEEN,)``: what this sequence's row of the step before has drawn."""
    start: int
    block_ids: Sequence[int]
    """The block table; covers ``start + len(tokens)`` tokens. It may grow, and changes in no other way."""
    adapter: StepAdapter | None = None
    adapter_start: int = 0
    """First position to which the adapter applies (0, but for activated LoRA)."""
    sampling: SamplingParams | None = None
    """None: the chunk does not reach the end of what is known, so no token is sampled."""
    prompt_tokens: Sequence[int] = ()
    """Filled only when penalties need it, like ``output_tokens``."""
    output_tokens: Sequence[int] = ()
    banned_tokens: Sequence[int] = ()
    """Tokens that may not be sampled now (the end tokens, while under ``min_tokens``)."""
    constraint: Constraint | None = None
    """What alone may be sampled now. While the row's token is unseen, its state lacks that token: it is to be
    asked once the host has read it."""
    scoring: PromptScoring | None = None
    pooling: Pooling | None = None
    """Set: the row is of a prompt whose vector is wanted."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. Rows are in batch order: decodes first, then prefill chunks."""

    rows: tuple[StepRow, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source, target) blocks to copy before the pass: a shared partial block about to be written."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    chosen: float
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class RowResult:
    """What came out of one row that had ``sampling``. Never changed once made; see `StepRow`."""

    seq_id: int
    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Set when the row's logits were not finite; ``token`` means nothing then."""


@dataclass(frozen=True, slots=True)
class StepResult:
    rows: tuple[RowResult, ...] = field(default=())
    """One for each row with ``sampling``, in batch order."""
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By ``seq_id``, of the tokens that the row's ``scoring`` names."""
    vectors: Mapping[int, np.ndarray] = field(default_factory=dict)
    """By ``seq_id``, the sum of the final hidden states that the row's ``pooling`` is of; float32 [H]."""
