"""Steps of any rows written over each other in one set of buffers compute what steps built anew compute."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.batch import build_forward_batch
from engine.drawn_tokens import DrawnTokens
from engine.kv_cache import KVCache
from engine.mixed_inputs import MixedInputs
from engine.model.adapter_reading import read_adapter
from engine.model.loading import LoadedModel, load_model
from engine.model.lora_pool import RankPagePool
from engine.step import UNSEEN, SamplingParams, StepAdapter, StepRow
from tests.model_zoo import save_adapter, save_tiny_model

CPU = torch.device("cpu")
MAX_TOKENS, MAX_ROWS, BLOCKS_EACH, MAX_PAGES = 160, 12, 5, 4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SAMPLES = SamplingParams()


@pytest.fixture(scope="module")
def model_and_adapters(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[LoadedModel, RankPagePool, list[StepAdapter]]:
    folder: Path = tmp_path_factory.mktemp("mixed_inputs")
    source = save_tiny_model(folder / "model")
    model = load_model(str(folder / "model"), dtype="float32", device="cpu", max_model_len=None)
    pool = RankPagePool(model.config, 16, model.dtype, CPU)
    adapters = []
    for i, (rank, pages) in enumerate(((8, (15,)), (64, (3, 0, 9, 4)), (24, (11, 1)))):
        saved = save_adapter(source, folder / str(i), rank=rank, targets=MODULES, seed=i)
        pool.write(pages, read_adapter(saved, model.network, pin=False))
        adapters.append(StepAdapter(i + 1, pages, rank))
    return model, pool, adapters


def random_rows(rng: random.Random, count: int, adapters: list[StepAdapter]) -> list[StepRow]:
    """Decodes and chunks at random positions, each with blocks of its own, some under a later adapter."""
    rows = []
    for i in range(count):
        start = rng.randrange(BLOCKS_EACH * 8)
        length = rng.choice((1, 1, 2, 7, 16, 23))
        blocks = tuple(i * BLOCKS_EACH + block for block in range((start + length - 1) // 16 + 1))
        rows.append(
            StepRow(
                i,
                [rng.randrange(320) for _ in range(length)],
                start,
                blocks,
                rng.choice([None, *adapters]),
                adapter_start=rng.choice((0, 0, 20)),
                sampling=rng.choice((SAMPLES, SAMPLES, None)),
            )
        )
    return rows


def filled_cache(model: LoadedModel) -> KVCache:
    cache = KVCache(model.config, MAX_ROWS * BLOCKS_EACH, model.dtype, CPU)
    cache.data.normal_(generator=torch.Generator().manual_seed(1))
    return cache


@torch.inference_mode()
def test_padded_buffers_compute_what_a_new_batch_does(
    model_and_adapters: tuple[LoadedModel, RankPagePool, list[StepAdapter]],
) -> None:
    model, pool, adapters = model_and_adapters
    inputs = MixedInputs(
        max_tokens=MAX_TOKENS,
        max_rows=MAX_ROWS,
        max_context_len=BLOCKS_EACH * 16,
        page_widths=(1, MAX_PAGES),
        device=CPU,
    )
    rng = random.Random(0)
    for count in (MAX_ROWS, 1, 9, 2, MAX_ROWS, 5):
        for loaded in (adapters, [], adapters[:1]):
            rows = random_rows(rng, count, loaded)
            while not inputs.fits(rows):
                rows.pop()
            width = inputs.write(rows)
            expected_cache, cache = filled_cache(model), filled_cache(model)
            expected = model.network.forward(build_forward_batch(rows, CPU), expected_cache, pool)
            for size in (max(inputs.size_of(rows), len(rows)), MAX_TOKENS):
                hidden = model.network.forward(inputs.batch(size, page_width=width), cache, pool)
                torch.testing.assert_close(hidden[: len(expected)], expected, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(cache.data, expected_cache.data, rtol=1e-4, atol=1e-4)


def test_unseen_tokens_are_filled_in() -> None:
    inputs = MixedInputs(max_tokens=16, max_rows=4, max_context_len=64, page_widths=(1,), device=CPU)
    decode = StepRow(7, (UNSEEN,), 5, (0,), sampling=SAMPLES)
    rows = [decode, StepRow(8, (3, 4, 5), 0, (1,)), replace(decode, seq_id=9)]
    drawn = DrawnTokens(torch.tensor([70, 90]), [rows[0], rows[2]])
    inputs.write(rows, DrawnTokens(torch.tensor([70, 80, 90]), [rows[0], rows[1], rows[2]]))
    assert inputs.batch(8, page_width=0).tokens.tolist() == [70, 3, 4, 5, 90, 0, 0, 0]
    inputs.write([rows[2], rows[1]], drawn)
    assert inputs.batch(8, page_width=0).tokens.tolist() == [90, 3, 4, 5, 0, 0, 0, 0]


def test_what_no_graph_holds_does_not_fit() -> None:
    inputs = MixedInputs(max_tokens=8, max_rows=2, max_context_len=64, page_widths=(1,), device=CPU)
    chunk = StepRow(0, (1, 2, 3, 4), 0, (0,))
    assert inputs.fits([chunk, chunk])
    assert not inputs.fits([chunk] * 3)
    assert not inputs.fits([chunk, replace(chunk, tokens=(1,) * 5)])
    assert not inputs.fits([replace(chunk, adapter=StepAdapter(1, (0, 1), 17))])
    assert not inputs.fits([replace(chunk, adapter=StepAdapter(1, (0,), 8, has_vectors=True))])
    assert not inputs.fits([replace(chunk, adapter=StepAdapter(1, (0,), 8, has_ends=True))])
