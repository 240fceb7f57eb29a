"""A step's plan as tensors."""

from __future__ import annotations

import torch

from engine.batch import build_forward_batch
from engine.step import SamplingParams, StepAdapter, StepRow

CPU = torch.device("cpu")
SAMPLES = SamplingParams()


def test_rows_lie_one_after_another() -> None:
    batch = build_forward_batch(
        (
            StepRow(1, [17], 33, (4, 2, 9), sampling=SAMPLES),
            StepRow(2, [8, 9, 10], 15, (7, 3)),
            StepRow(3, [5, 6], 0, (0,), sampling=SAMPLES),
        ),
        CPU,
    )
    assert batch.tokens.tolist() == [17, 8, 9, 10, 5, 6]
    assert batch.output_rows.tolist() == [0, 5]
    plan = batch.attention
    assert plan.query_starts.tolist() == [0, 1, 4, 6]
    assert plan.context_lens.tolist() == [34, 18, 2]
    assert plan.positions.tolist() == [33, 15, 16, 17, 0, 1]
    assert plan.block_tables.tolist() == [[4, 2, 9], [7, 3, -1], [0, -1, -1]]
    assert plan.slots.tolist() == [9 * 16 + 1, 7 * 16 + 15, 3 * 16, 3 * 16 + 1, 0, 1]
    assert plan.max_query_len == 3
    assert batch.lora.num_rows == batch.lora.num_segments == 0
    dtypes = {plan.query_starts.dtype, plan.context_lens.dtype, plan.block_tables.dtype}
    assert dtypes == {torch.int32}
    assert {batch.tokens.dtype, plan.slots.dtype, plan.positions.dtype} == {torch.int64}


def test_tokens_are_grouped_by_adapter() -> None:
    small, large = StepAdapter(5, (2,), 8), StepAdapter(9, (7, 1, 3), 40)
    batch = build_forward_batch(
        (
            StepRow(1, [1], 5, (0,), adapter=large),
            StepRow(2, [1, 2], 0, (1,)),
            StepRow(3, [1, 2], 3, (2,), adapter=small),
            StepRow(4, [1, 2, 3], 0, (3,), adapter=large),
        ),
        CPU,
    )
    plan = batch.lora
    assert plan.rows.tolist() == [0, 5, 6, 7, 3, 4]
    assert plan.segment_starts.tolist() == [0, 4, 6]
    assert plan.segment_pages.tolist() == [[7, 1, 3], [2, -1, -1]]
    assert plan.segment_ranks.tolist() == [40, 8]
    assert (plan.num_rows, plan.num_segments) == (6, 2)
    assert {plan.rows.dtype, plan.segment_starts.dtype, plan.segment_pages.dtype} == {torch.int32}


def test_an_adapter_applies_from_its_start_on() -> None:
    adapter = StepAdapter(1, (0,), 4)
    rows = [
        StepRow(i, [1, 2, 3, 4], start, (0, 1), adapter=adapter, adapter_start=10)
        for i, start in enumerate((2, 8, 12))
    ]
    assert build_forward_batch(rows, CPU).lora.rows.tolist() == [6, 7, 8, 9, 10, 11]
