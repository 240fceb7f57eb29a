"""Each row's own parameters, and results that say which row failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.sampler import Sampler
from engine.step import SamplingParams, StepAdapter, StepResult, StepRow

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, rows: Sequence[StepRow]) -> StepResult:
    pending, drawn = Sampler(CPU).draw(logits, rows)
    result = pending.result()
    assert drawn.tokens.tolist() == [found.token for found in result.rows]
    return result


def row(seq_id: int, params: SamplingParams | None, *, banned: tuple[int, ...] = ()) -> StepRow:
    return StepRow(seq_id, [1, 2], 10, (0,), sampling=params, banned_tokens=banned)


def test_positions_and_seeds_are_the_sequence_own() -> None:
    seeds = (3, 2**63, 2**64 - 1)
    batch = Sampler(CPU).batch([row(i, SamplingParams(seed=seed)) for i, seed in enumerate(seeds)])
    assert batch.positions.tolist() == [12, 12, 12]
    assert batch.seeds.tolist() == [3, -(2**63), -1]
    assert batch.all_greedy
    assert batch.edits is None
    assert not Sampler(CPU).batch([row(1, SamplingParams(temperature=0.7))]).all_greedy


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 9.0, 1.0], [float("inf"), 0.0, 0.0]])
    results = draw(logits, [row(i, SamplingParams(logprobs=1)) for i in range(3)]).rows
    assert [r.error is None for r in results] == [False, True, False]
    assert results[0].error is not None and "not finite" in results[0].error
    assert results[0].logprobs is None
    assert results[1].token == 1


def test_only_a_row_with_an_adapter_is_told_that_its_adapter_overflows() -> None:
    rows = [row(1, SamplingParams()), replace(row(2, SamplingParams()), adapter=StepAdapter(1, (0,), 8))]
    base, adapted = draw(torch.full((2, 3), math.nan), rows).rows
    assert base.error is not None and "adapter" not in base.error and "not finite" in base.error
    assert adapted.error is not None and "its adapter's weights overflow" in adapted.error


def test_bans_that_leave_nothing_are_told_from_overflow() -> None:
    banned = row(1, SamplingParams(), banned=(0, 1, 2))
    (result,) = draw(torch.zeros(1, 3), [banned]).rows
    assert result.error is not None and "no token" in result.error and "not finite" not in result.error


def test_bias_and_bans_change_the_choice() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.0], [1.0, 5.0, 4.0]])
    rows = (
        row(1, SamplingParams(logit_bias=((0, 4.5),))),
        row(2, SamplingParams(logit_bias=((1, 50.0),)), banned=(1,)),
    )
    assert [r.token for r in draw(logits, rows).rows] == [0, 2]


def test_penalties_count_output_and_see_the_prompt() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    penalized = replace(row(2, params, banned=(4,)), prompt_tokens=(7, 8, 7), output_tokens=(8, 3, 3))
    edits = Sampler(CPU).batch([row(1, SamplingParams()), penalized]).edits
    assert edits is not None
    columns = (edits.rows, edits.tokens, edits.biases, edits.counts, edits.seen)
    assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == [
        (1, 3, 0.0, 2, True),
        (1, 4, -math.inf, 0, False),
        (1, 7, 0.0, 0, True),
        (1, 8, 0.0, 1, True),
    ]
    assert edits.presence.tolist() == [0.0, 0.5]
    assert edits.frequency.tolist() == [0.0, 0.25]
    assert edits.repetition.tolist() == [1.0, 2.0]


def test_each_row_gets_the_alternatives_it_asked_for() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    rows = [row(i, SamplingParams(logprobs=count)) for i, count in enumerate((2, 0, None))]
    first, second, third = draw(logits, rows).rows
    assert first.logprobs is not None and second.logprobs is not None
    assert first.logprobs.top_tokens == (1, 2)
    assert first.logprobs.chosen == pytest.approx(torch.log_softmax(logits[0], 0)[1].item())
    assert first.logprobs.top_logprobs[0] == first.logprobs.chosen
    assert second.logprobs.top_tokens == ()
    assert third.logprobs is None


def test_parameters_follow_the_rows_from_step_to_step() -> None:
    sampler = Sampler(CPU)
    warm, cold = SamplingParams(temperature=0.7, top_k=5, logprobs=2), SamplingParams(seed=9)
    for params in ([warm, cold], [warm, cold], [cold, warm], [cold], [warm, cold]):
        rows = [replace(row(i, p), start=20 + i) for i, p in enumerate(params)]
        batch = sampler.batch(rows)
        assert batch.temperature.tolist() == pytest.approx([p.temperature for p in params])
        assert batch.top_k.tolist() == [p.top_k for p in params]
        assert batch.seeds.tolist() == [p.seed for p in params]
        assert batch.positions.tolist() == [22 + i for i in range(len(params))]
        assert batch.all_greedy == (params == [cold])
        assert batch.num_logprobs == (2 if warm in params else None)
