"""The loop over a GPU: graphs with a step under way give the text of eager steps in turn, and cold adapters
come beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.sequence import FinishReason
from tests.engine.sampled_serving import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Served, serve
from tests.model_zoo import save_adapter, save_tiny_model

pytestmark = pytest.mark.gpu

NUM_PAGES = 6
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, dict[bytes, Path]]:
    """A small model, and adapters of ranks 8, 64 and 16, which do not all fit at once."""
    folder = tmp_path_factory.mktemp("zoo")
    source = save_tiny_model(folder / "model", head_dim=64, hidden_size=256, num_attention_heads=4)
    folders = {
        b"adapter-%d" % i: save_adapter(source, folder / str(i), rank=rank, targets=MODULES, seed=i)
        for i, rank in enumerate((8, 64, 16, 64))
    }
    return load_model(str(folder / "model"), dtype="float32", device="cuda", max_model_len=None), folders


def run(
    zoo: tuple[LoadedModel, dict[bytes, Path]], seed: int, *, num_blocks: int = 200, overlap: bool
) -> Served:
    """In turn eagerly, or overlapped by graphs."""
    model, folders = zoo
    runner = Runner(model, num_blocks=num_blocks, num_rank_pages=NUM_PAGES, max_lora_rank=64)
    if overlap:
        runner.warm_up(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
        runner.capture_graphs(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
    return serve(
        model, runner, seed, num_blocks=num_blocks, overlap=overlap, folders=folders, num_pages=NUM_PAGES
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_same_text_by_graphs_with_a_step_under_way(
    zoo: tuple[LoadedModel, dict[bytes, Path]], seed: int
) -> None:
    want = run(zoo, seed, overlap=False)
    assert set(want.ends.values()) == {FinishReason.STOP, FinishReason.LENGTH} and want.logprobs
    for num_blocks in (200, 12):
        got = run(zoo, seed, num_blocks=num_blocks, overlap=True)
        assert (got.tokens, got.ends) == (want.tokens, want.ends)
        for key, logprobs in want.logprobs.items():
            assert got.logprobs[key] == pytest.approx(logprobs, abs=1e-3)
