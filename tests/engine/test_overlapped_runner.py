"""The real runner on a CPU, stepped with and without a step under way: the same text, whatever is sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.sequence import FinishReason
from tests.engine.sampled_serving import MAX_NUM_SEQS, Served, company, serve, serve_requests
from tests.model_zoo import save_adapter, save_tiny_model

NUM_PAGES = 2


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, dict[bytes, Path]]:
    """A tiny model, and three adapters, of which two fit at once."""
    folder = tmp_path_factory.mktemp("zoo")
    source = save_tiny_model(folder / "model")
    folders = {
        b"adapter-%d" % i: save_adapter(
            source, folder / str(i), rank=rank, targets=("q_proj", "up_proj"), seed=i
        )
        for i, rank in enumerate((4, 16, 20))
    }
    return load_model(str(folder / "model"), dtype="float32", device="cpu", max_model_len=None), folders


def run(
    zoo: tuple[LoadedModel, dict[bytes, Path]], seed: int, *, num_blocks: int = 120, overlap: bool
) -> Served:
    model, folders = zoo
    runner = Runner(model, num_blocks=num_blocks, num_rank_pages=NUM_PAGES)
    return serve(
        model, runner, seed, num_blocks=num_blocks, overlap=overlap, folders=folders, num_pages=NUM_PAGES
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_same_text_with_a_step_under_way(zoo: tuple[LoadedModel, dict[bytes, Path]], seed: int) -> None:
    want = run(zoo, seed, overlap=False)
    assert set(want.ends.values()) == {FinishReason.STOP, FinishReason.LENGTH} and want.logprobs
    for num_blocks in (120, 12):
        got = run(zoo, seed, num_blocks=num_blocks, overlap=True)
        assert (got.num_preemptions > 0) == (num_blocks == 12)
        assert (got.tokens, got.ends) == (want.tokens, want.ends)
        for key, logprobs in want.logprobs.items():
            assert got.logprobs[key] == pytest.approx(logprobs, abs=1e-3)


def test_searches_beside_background_work_with_a_step_under_way(
    zoo: tuple[LoadedModel, dict[bytes, Path]],
) -> None:
    """Beams share blocks and copy them, and background work gives way, while a step computes."""
    model, folders = zoo

    def run_company(*, num_blocks: int, overlap: bool) -> Served:
        requests = company(model.config.vocab_size, [b"", *folders], seed=1)
        runner = Runner(model, num_blocks=num_blocks, num_rank_pages=NUM_PAGES)
        return serve_requests(
            model,
            runner,
            requests,
            num_blocks=num_blocks,
            overlap=overlap,
            folders=folders,
            num_pages=NUM_PAGES,
            at_once=MAX_NUM_SEQS,
        )

    want = run_company(num_blocks=120, overlap=False)
    assert want.num_yields, "background work gives way"
    for num_blocks in (120, 22):
        got = run_company(num_blocks=num_blocks, overlap=True)
        assert (got.num_preemptions > 0) == (num_blocks == 22)
        assert (got.tokens, got.ends) == (want.tokens, want.ends)
