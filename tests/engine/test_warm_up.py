"""The steps before serving: of every kind that a GPU has kernels for, and such that any runner runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.drawn_tokens import DrawnTokens
from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.sampler import Sampler
from engine.step import UNSEEN, StepRow
from engine.warm_up import StepSizes, warm_up_steps
from kernels.sampling_batch import SamplingBatch
from tests.model_zoo import save_tiny_model

SIZES = StepSizes(
    num_blocks=40, max_model_len=512, vocab_size=320, max_num_seqs=40, max_num_batched_tokens=600
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return load_model(str(folder), dtype="float32", device="cpu", max_model_len=None)


def test_a_gpu_s_steps_run_and_meet_every_kind_of_draw(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[SamplingBatch] = []
    make = Sampler.batch

    def noted(self: Sampler, rows: Sequence[StepRow], drawn: DrawnTokens | None = None) -> SamplingBatch:
        batches.append(make(self, rows, drawn))
        return batches[-1]

    monkeypatch.setattr(Sampler, "batch", noted)
    runner = Runner(model, num_blocks=SIZES.num_blocks, num_rank_pages=4, max_lora_rank=64)
    plans = list(warm_up_steps(SIZES, [1, 4], on_gpu=True))
    for plan in plans:
        assert all(row.error is None for row in runner.execute(plan).rows)
    kinds = {(b.all_greedy, b.edits is not None or b.allowed is not None) for b in batches}
    assert kinds == {(True, False), (False, False), (False, True), (True, True)}
    assert any(batch.allowed is not None for batch in batches), "a grammar is met"
    assert {1, 32, 40} <= {len(batch.temperature) for batch in batches}
    assert any(row.tokens[0] == UNSEEN for plan in plans for row in plan.rows)
    assert any(plan.block_copies for plan in plans)
    assert any(sum(len(row.tokens) > 1 for row in plan.rows) > 1 for plan in plans)


@pytest.mark.parametrize(
    "sizes", [replace(SIZES, num_blocks=1, max_num_seqs=1, max_num_batched_tokens=3), SIZES]
)
def test_no_step_is_larger_than_an_engine_s_own(sizes: StepSizes) -> None:
    for plan in warm_up_steps(sizes, [], on_gpu=True):
        assert len(plan.rows) <= max(sizes.max_num_seqs, 2)
        assert sum(len(row.tokens) for row in plan.rows) <= max(
            sizes.max_num_batched_tokens, sizes.max_num_seqs, 3
        )
        for row in plan.rows:
            assert row.start + len(row.tokens) <= 16 * len(row.block_ids)
            assert max(row.block_ids) < sizes.num_blocks
