"""Edits of a step whose newest tokens no host has seen: the same as if it had."""

from __future__ import annotations

import random

import torch

from engine.drawn_tokens import DrawnTokens
from engine.sampler import Sampler
from engine.step import UNSEEN, SamplingParams, StepRow
from kernels.sampling_batch import TokenEdits

CPU = torch.device("cpu")
VOCAB = 12


def random_rows(rng: random.Random) -> tuple[list[StepRow], list[StepRow], DrawnTokens]:
    """The same decode rows with their newest token known, and unseen; and what the step before has drawn."""
    known, unseen = [], []
    for seq_id in range(rng.randrange(1, 7)):
        params = rng.choice(
            [
                SamplingParams(),
                SamplingParams(presence_penalty=0.5),
                SamplingParams(frequency_penalty=0.25, logit_bias=((3, 1.5), (5, -1.0))),
                SamplingParams(repetition_penalty=1.3, presence_penalty=0.1),
                SamplingParams(logit_bias=((7, 2.0),)),
            ]
        )
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))]
        output = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        banned = (rng.randrange(VOCAB),) if rng.random() < 0.3 else ()
        start = len(prompt) + len(output) - 1
        common = {"sampling": params, "prompt_tokens": prompt, "banned_tokens": banned}
        known.append(StepRow(seq_id, output[-1:], start, (0,), output_tokens=output, **common))
        if rng.random() < 0.3:
            unseen.append(known[-1])
        else:
            unseen.append(StepRow(seq_id, (UNSEEN,), start, (0,), output_tokens=output[:-1], **common))
    before = rng.sample(known, len(known))
    return known, unseen, DrawnTokens(torch.tensor([row.tokens[0] for row in before]), before)


def live(edits: TokenEdits | None) -> set[tuple[float, ...]]:
    if edits is None:
        return set()
    columns = (edits.rows, edits.tokens, edits.biases, edits.counts, edits.seen)
    entries = [entry for entry in zip(*(column.tolist() for column in columns), strict=True) if entry[0] >= 0]
    assert len({entry[:2] for entry in entries}) == len(entries), "a pair of row and token is there twice"
    assert edits.rows.tolist() == sorted(edits.rows.tolist())
    return set(entries)


def test_an_unseen_token_counts_as_if_it_were_known() -> None:
    rng = random.Random(0)
    for _ in range(300):
        known, unseen, drawn = random_rows(rng)
        want = Sampler(CPU).batch(known)
        got = Sampler(CPU).batch(unseen, drawn)
        assert live(got.edits) == live(want.edits)
        assert got.positions.tolist() == want.positions.tolist()
