"""Edits of a step whose newest tokens no host has seen: the same as if it had."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from engine.drawn_tokens import DrawnTokens
from engine.sampler import Sampler
from engine.step import UNSEEN, SamplingParams, StepRow
from kernels.sampling_batch import TokenEdits

CPU = torch.device("cpu")
VOCAB = 100


@dataclass
class Stream:
    """A sequence that has drawn at least one token."""

    seq_id: int
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    banned: tuple[int, ...]

    def row(self, *, unseen: bool) -> StepRow:
        """Its next decode row, with its newest token known or not."""
        return StepRow(
            self.seq_id,
            (UNSEEN,) if unseen else self.output[-1:],
            len(self.prompt) + len(self.output) - 1,
            (0,),
            sampling=self.params,
            prompt_tokens=self.prompt,
            output_tokens=self.output[: -1 if unseen else None],
            banned_tokens=self.banned if len(self.output) < 5 else (),
        )


def random_stream(rng: random.Random, seq_id: int) -> Stream:
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
    banned = (rng.randrange(VOCAB), VOCAB - 1) if rng.random() < 0.4 else ()
    return Stream(seq_id, params, prompt, [rng.randrange(VOCAB)], tuple(dict.fromkeys(banned)))


def live(edits: TokenEdits | None) -> set[tuple[float, ...]]:
    """What the edits change, by row and token."""
    if edits is None:
        return set()
    columns = (edits.rows, edits.tokens, edits.biases, edits.counts, edits.seen)
    entries = [entry for entry in zip(*(column.tolist() for column in columns), strict=True) if entry[0] >= 0]
    assert len({entry[:2] for entry in entries}) == len(entries), "a pair of row and token is there twice"
    assert edits.rows.tolist() == sorted(edits.rows.tolist())
    return {entry for entry in entries if entry[2:] != (0.0, 0, False)}  # a ban that is over changes nothing


def test_edits_follow_their_sequences_whether_tokens_are_seen_or_not() -> None:
    """One sampler over all steps, of sequences that come, pause and go, against a new one for each step."""
    rng = random.Random(0)
    for _ in range(20):
        kept = Sampler(CPU)
        streams = [random_stream(rng, seq_id) for seq_id in range(rng.randrange(1, 7))]
        for _ in range(rng.choice((5, 100))):
            before = rng.sample(streams, len(streams))
            drawn = DrawnTokens(
                torch.tensor([stream.output[-1] for stream in before]),
                [stream.row(unseen=True) for stream in before],
            )
            present = rng.sample(streams, rng.randrange(1, len(streams) + 1))
            known = [stream.row(unseen=False) for stream in present]
            rows = [stream.row(unseen=rng.random() < 0.7) for stream in present]
            want, got = Sampler(CPU).batch(known), kept.batch(rows, drawn)
            assert live(got.edits) == live(want.edits)
            assert got.positions.tolist() == want.positions.tolist()
            for stream in present:
                stream.output.append(rng.randrange(VOCAB))
