"""Decode steps written over each other in one set of buffers compute what steps built anew compute."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from engine.batch import build_forward_batch
from engine.decode_inputs import DecodeInputs
from engine.graphs import captured_sizes
from engine.kv_cache import KVCache
from engine.model.adapter_reading import read_adapter
from engine.model.loading import LoadedModel, load_model
from engine.model.lora_pool import RankPagePool
from engine.step import SamplingParams, StepAdapter, StepRow
from tests.model_zoo import save_adapter, save_tiny_model

CPU = torch.device("cpu")
MAX_ROWS = 24
MAX_PAGES = 4
BLOCKS_EACH = 4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SAMPLES = SamplingParams()


@pytest.fixture(scope="module")
def model_and_adapters(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[LoadedModel, RankPagePool, list[StepAdapter]]:
    folder = tmp_path_factory.mktemp("decode_inputs")
    source = save_tiny_model(folder / "model")
    model = load_model(str(folder / "model"), dtype="float32", device="cpu", max_model_len=None)
    pool = RankPagePool(model.config, 16, model.dtype, CPU)
    adapters = []
    for i, (rank, pages) in enumerate(((8, (15,)), (64, (3, 0, 9, 4)), (16, (7,)), (24, (11, 1)))):
        saved = save_adapter(source, folder / str(i), rank=rank, targets=MODULES, seed=i)
        pool.write(pages, read_adapter(saved, model.network, pin=False))
        adapters.append(StepAdapter(i + 1, pages, rank))
    return model, pool, adapters


def filled_cache(model: LoadedModel) -> KVCache:
    cache = KVCache(model.config, MAX_ROWS * BLOCKS_EACH, model.dtype, CPU)
    cache.data.normal_(generator=torch.Generator().manual_seed(1))
    return cache


def decode_rows(rng: random.Random, count: int, adapters: list[StepAdapter]) -> list[StepRow]:
    """Rows at random positions, each with blocks of its own, some under an adapter that starts later."""
    rows = []
    for i in range(count):
        start = rng.randrange(BLOCKS_EACH * 16)
        blocks = tuple(i * BLOCKS_EACH + block for block in range(start // 16 + 1))
        rows.append(
            StepRow(
                i,
                (rng.randrange(320),),
                start,
                blocks,
                rng.choice([None, *adapters]),
                adapter_start=rng.choice((0, 0, 40)),
                sampling=SAMPLES,
            )
        )
    return rows


@torch.inference_mode()
def test_padded_buffers_compute_what_a_new_batch_does(
    model_and_adapters: tuple[LoadedModel, RankPagePool, list[StepAdapter]],
) -> None:
    model, pool, adapters = model_and_adapters
    inputs = DecodeInputs(max_rows=MAX_ROWS, max_context_len=64, page_widths=(1, MAX_PAGES), device=CPU)
    rng = random.Random(0)
    for count in (MAX_ROWS, 3, 1, 17, 8, 2, MAX_ROWS):
        for loaded in (adapters, [], adapters[1:2], adapters[:1]):
            rows = decode_rows(rng, count, loaded)
            assert inputs.fits(rows)
            width = inputs.write(rows)
            live = [row.adapter for row in rows if row.adapter and row.start >= row.adapter_start]
            widest = max((len(adapter.pages) for adapter in live), default=0)
            assert width == {0: 0, 1: 1}.get(widest, MAX_PAGES)
            expected_cache, cache = filled_cache(model), filled_cache(model)
            expected = model.network.forward(build_forward_batch(rows, CPU), expected_cache, pool)
            for size in {count, min(count + 5, MAX_ROWS), MAX_ROWS}:
                batch = inputs.batch(size, page_width=width)
                hidden = model.network.forward(batch, cache, pool)
                assert hidden.shape[0] == size
                torch.testing.assert_close(hidden[:count], expected, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(cache.data, expected_cache.data, rtol=1e-4, atol=1e-4)


def test_a_smaller_step_leaves_nothing_of_the_one_before(
    model_and_adapters: tuple[LoadedModel, RankPagePool, list[StepAdapter]],
) -> None:
    _, _, adapters = model_and_adapters
    inputs = DecodeInputs(max_rows=4, max_context_len=64, page_widths=(1, MAX_PAGES), device=CPU)
    inputs.write([StepRow(i, (9,), 20, (5, 6), adapters[i], sampling=SAMPLES) for i in range(4)])
    inputs.write([StepRow(0, (7,), 3, (2,), adapters[3], sampling=SAMPLES)])
    batch = inputs.batch(4, page_width=MAX_PAGES)
    assert batch.tokens.tolist() == [7, 0, 0, 0]
    assert batch.attention.slots.tolist() == [2 * 16 + 3, -1, -1, -1]
    assert batch.attention.context_lens.tolist() == [4, 0, 0, 0]
    assert batch.attention.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.lora.rows.tolist() == [0, -1, -1, -1]
    assert batch.lora.segment_starts.tolist() == [0, 1, 1, 1, 1]
    assert batch.lora.segment_ranks.tolist() == [24, 0, 0, 0]
    assert batch.lora.segment_pages.tolist() == [[11, 1, -1, -1]] + [[-1] * 4] * 3


def test_block_tables_follow_growth_and_exchange() -> None:
    """Tables are appended to in place, and rows change places between steps."""
    inputs = DecodeInputs(max_rows=3, max_context_len=96, page_widths=(), device=CPU)
    rng = random.Random(3)
    tables = [[rng.randrange(99)] for _ in range(4)]
    for _ in range(40):
        for table in tables:
            if len(table) < 6 and rng.random() < 0.3:
                table.append(rng.randrange(99))
        if rng.random() < 0.3:
            tables[rng.randrange(4)] = [rng.randrange(99) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.5:
            rng.shuffle(tables)
        shown = tables[: rng.randrange(1, 4)]
        inputs.write([StepRow(i, (1,), 16 * len(t) - 1, t, sampling=SAMPLES) for i, t in enumerate(shown)])
        written = inputs.batch(3, page_width=0).attention.block_tables.tolist()
        assert [written[i][: len(table)] for i, table in enumerate(shown)] == shown


def test_only_pure_decode_steps_fit() -> None:
    inputs = DecodeInputs(max_rows=2, max_context_len=64, page_widths=(1,), device=CPU)
    decode = StepRow(0, (1,), 5, (0,), sampling=SAMPLES)
    assert inputs.fits([decode, decode])
    assert not inputs.fits([decode] * 3)
    assert not inputs.fits([decode, StepRow(1, (1, 2), 0, (0,), sampling=SAMPLES)])
    assert not inputs.fits([StepRow(1, (1,), 0, (0,))]), "a chunk that does not sample"
    assert not inputs.fits([StepRow(1, (1,), 5, (0,), StepAdapter(1, (0, 1), 17), sampling=SAMPLES)])


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 50, 64, 100, 256])
def test_a_graph_holds_every_batch_size(max_num_seqs: int) -> None:
    sizes = captured_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    gaps = [later - earlier for earlier, later in pairwise(sizes)]
    assert max(gaps, default=0) <= 16
