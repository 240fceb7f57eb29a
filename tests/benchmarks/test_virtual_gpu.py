"""The scheduler over measured steps: times between those measured, and figures that follow from them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.virtual_gpu import CASES, HOST_MS, RESULTS, StepTimes, serve, weighted_p99
from engine.step import SamplingParams, StepPlan, StepRow


def plan(decodes: int, tokens: int) -> StepPlan:
    rows = [StepRow(i, [1], 600, range(38), sampling=SamplingParams()) for i in range(decodes)]
    if tokens:
        rows.append(StepRow(decodes, [1] * tokens, 0, range(512), sampling=SamplingParams()))
    return StepPlan(tuple(rows))


def test_steps_take_what_was_measured_and_in_between_what_lies_between() -> None:
    mixed = json.loads((RESULTS / "h200-steps.json").read_text())["mixed"]
    times = StepTimes()
    for name, ms in mixed.items():
        tokens, decodes = (int(part.split()[0]) for part in name.split(", "))
        assert times(plan(decodes, tokens - decodes)) == pytest.approx(ms + HOST_MS)
    low, high = times(plan(28, 100)), times(plan(28, 164))
    assert low < times(plan(28, 130)) < high
    assert times(plan(28, 100)) < times(plan(60, 100)) < times(plan(128, 100)) < times(plan(200, 100))


def test_one_sequence_takes_its_steps_one_after_another() -> None:
    times = StepTimes()
    alone = replace(CASES["room for 8"], requests=1, per=1, prompt=(512, 512), output=(11, 11))
    figures = serve(alone, times, seed=0)
    prompt, decode = times(plan(0, 512)), times(plan(1, 0))
    assert figures["ttft_p50_ms"] == pytest.approx(prompt)
    assert figures["tokens_s"] == pytest.approx(11e3 / (prompt + 10 * decode))
    assert figures["gap_p99_ms"] == pytest.approx(decode)


def test_the_percentile_counts_tokens_not_steps() -> None:
    assert weighted_p99([(1.0, 980), (50.0, 19), (90.0, 1)]) == 50.0
