"""The steps that a runner computes before it serves.

A GPU's kernels are compiled, or at least loaded, when something first needs them, and to load one may make
the host wait for all that the device has been given. So each kind of step that requests may need runs once:
those that graphs are not made for among them, as steps of many tokens and of adapters with vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.constraints import Constraint
from engine.step import UNSEEN, SamplingParams, StepAdapter, StepPlan, StepRow
from kernels.plans import BLOCK_SIZE, RANK_PAGE

_GREEDY = SamplingParams()
_DRAWN = SamplingParams(temperature=1.0)
_FILTERED = SamplingParams(temperature=1.0, top_p=0.9, logit_bias=((0, 1.0),), logprobs=1)
_PENALIZED = SamplingParams(repetition_penalty=1.1, logit_bias=((0, 1.0),))
_NUM_PROMPTS = 4
"""Prompts of one step: with more than one, attention has another kernel than with one alone."""
_FEWER, _MORE = 256, 512
"""Tokens of a step that kernels of adapters differ by: up to so many, up to so many, and more."""
_CROWD = 33
"""Rows whose lists have kernels of another size; there are as many adapters."""
_FEW_ROWS = 32
"""Up to so many rows ``lm_head``'s product is a kernel of ours, one for up to 16 and one for the others."""
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What bounds the steps of one runner.

    Attributes:
        num_blocks: of the KV cache; each is written to.
        vocab_size: tokens that the base model can draw.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of the longest prompt that one step can hold."""
        return min(self.max_num_batched_tokens, self.num_blocks * BLOCK_SIZE, self.max_model_len)


def warm_up_steps(sizes: StepSizes, page_widths: Sequence[int], *, on_gpu: bool) -> Iterator[StepPlan]:
    """The steps, to be run in this order. They read and write any block, and read page 0.

    Args:
        page_widths: rank pages of an adapter, for each of which a GPU has kernels of their own.
    """
    widths = page_widths or [0]
    if not on_gpu:
        yield from _largest(sizes, _adapter(widths[0]))
        return
    for width in widths:
        yield from _largest(sizes, _adapter(width))
        yield _small(_adapter(width))
        yield from _crowds(sizes, width)
    if page_widths:
        yield _small(StepAdapter(1, (0, 0), RANK_PAGE, has_vectors=True))
    yield from _rare(sizes)


def _largest(sizes: StepSizes, adapter: StepAdapter | None) -> Iterator[StepPlan]:
    """The largest prefill and the largest decode."""
    tokens, blocks = [0] * sizes.num_tokens, _blocks(sizes)
    num_prompts = min(sizes.max_num_seqs, sizes.max_num_batched_tokens // sizes.num_tokens)
    yield StepPlan((StepRow(0, tokens, 0, blocks, adapter, sampling=_GREEDY),) * num_prompts)
    yield StepPlan((StepRow(0, [0], 0, blocks, adapter, sampling=_DRAWN),) * sizes.max_num_seqs)


def _small(adapter: StepAdapter | None) -> StepPlan:
    """A decode beside a chunk of a prompt, with most of what sampling has."""
    decode = StepRow(0, [0], 0, (0,), adapter, sampling=_DRAWN)
    return StepPlan((decode, replace(decode, tokens=[0, 0], sampling=_FILTERED)))


def _crowds(sizes: StepSizes, width: int) -> Iterator[StepPlan]:
    """Steps of some tokens each, under one adapter and under many."""
    for count in {min(count, sizes.num_tokens) for count in (_FEW_ROWS, _FEWER, _MORE)}:
        yield StepPlan((StepRow(0, [0] * count, 0, _blocks(sizes), _adapter(width), sampling=_GREEDY),))
        each = max(2, count // _CROWD)
        rows = range(min(_CROWD, sizes.max_num_seqs, count // each))
        prompt = StepRow(0, [0] * min(each, sizes.num_tokens), 0, _blocks(sizes), sampling=_GREEDY)
        yield StepPlan(tuple(replace(prompt, seq_id=i, adapter=_adapter(width, i + 1)) for i in rows))


def _rare(sizes: StepSizes) -> Iterator[StepPlan]:
    """Prompts side by side; then rows that go on from what these have drawn, unseen by the host and under
    penalties, after a block has been copied; fewer and fewer rows, whose contexts are cut into more and more
    parts; and rows under a grammar.
    """
    count, blocks = min(_NUM_PROMPTS, sizes.max_num_seqs), _blocks(sizes)
    length = sizes.num_tokens // _NUM_PROMPTS
    if not length:
        return
    prompt = StepRow(0, [0] * length, 0, blocks, sampling=_GREEDY)
    yield StepPlan(tuple(replace(prompt, seq_id=i) for i in range(count)))
    unseen = StepRow(0, (UNSEEN,), length, blocks, sampling=_PENALIZED)
    held = StepRow(0, [0], length, blocks, sampling=_GREEDY, constraint=_AnyToken(sizes.vocab_size))
    unseen_rows = tuple(replace(unseen, seq_id=i) for i in range(count))
    yield StepPlan(unseen_rows, block_copies=((0, sizes.num_blocks - 1),))
    num_rows = sizes.max_num_seqs
    while num_rows := num_rows // 2:
        yield StepPlan((replace(prompt, tokens=[0]),) * num_rows)
    for sampling in (_GREEDY, _DRAWN):
        yield StepPlan((replace(held, sampling=sampling),) * min(_FEW_ROWS, sizes.max_num_seqs))


class _AnyToken(Constraint):
    """A grammar that allows everything."""

    def __init__(self, vocab_size: int) -> None:
        self.num_words = -(-vocab_size // _WORD_BITS)

    @property
    def fault(self) -> str:
        return ""

    def write_allowed(self, words: np.ndarray) -> None:
        words[:] = -1


def _adapter(page_width: int, adapter_id: int = 1) -> StepAdapter | None:
    return StepAdapter(adapter_id, (0,) * page_width, RANK_PAGE * page_width) if page_width else None


def _blocks(sizes: StepSizes) -> Sequence[int]:
    return range(-(-sizes.num_tokens // BLOCK_SIZE))
