"""The Triton attention kernels, interpreted on the CPU, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.gpu.paged_attention import DecodeConfig, PrefillConfig, paged_attention, prepare
from kernels.plans import BLOCK_SIZE, AttentionPlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has them compiled")


def make_plan(sequences: list[tuple[int, int]], padding: int = 0) -> tuple[AttentionPlan, int]:
    """Sequences of ``(queries, context)`` over shuffled blocks; the number of blocks is the second result.

    ``padding`` adds as many tokens and sequences that are none.
    """
    tables = [-(-context // BLOCK_SIZE) for _, context in sequences]
    width, num_blocks = max(tables) + 1, sum(tables) + 3
    free = torch.randperm(num_blocks).tolist()
    table = torch.full((len(sequences) + padding, width), -1, dtype=torch.int32)
    starts = [0]
    for s, (queries, _) in enumerate(sequences):
        starts.append(starts[-1] + queries)
        table[s, : tables[s]] = torch.tensor([free.pop() for _ in range(tables[s])], dtype=torch.int32)
    starts += [starts[-1]] * padding
    num_tokens = starts[-1] + padding
    plan = AttentionPlan(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([c for _, c in sequences] + [0] * padding, dtype=torch.int32),
        block_tables=table,
        slots=torch.full((num_tokens,), -1),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        max_query_len=max(q for q, _ in sequences),
    )
    return plan, num_blocks


def make_caches(
    plan: AttentionPlan, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values where a context is, NaN everywhere else."""
    shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
    caches = torch.randn(2, *shape).to(dtype)
    live = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    for s, context in enumerate(plan.context_lens.tolist()):
        for token in range(context):
            live[int(plan.block_tables[s, token // BLOCK_SIZE]), token % BLOCK_SIZE] = True
    caches[:, ~live[:, None, :].expand(-1, num_kv_heads, -1)] = float("nan")
    return caches[0], caches[1]


def check(
    sequences: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 1),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    padding: int = 0,
    decode: DecodeConfig | None = None,
    prefill: PrefillConfig | None = None,
) -> None:
    torch.manual_seed(len(sequences) * 1000 + head_dim)
    plan, num_blocks = make_plan(sequences, padding)
    k_cache, v_cache = make_caches(plan, num_blocks, heads[1], head_dim, dtype)
    num_tokens = plan.slots.shape[0]
    qkv = torch.randn(num_tokens, (heads[0] + 2 * heads[1]) * head_dim).to(dtype)
    live = int(plan.query_starts[-1])
    qkv[live:] = float("nan")
    got = paged_attention(
        qkv, k_cache, v_cache, plan, num_heads=heads[0], scale=0.3, decode=decode, prefill=prefill
    )
    want = reference.paged_attention(
        qkv.double(), k_cache.double(), v_cache.double(), plan, num_heads=heads[0], scale=0.3
    )
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(got[:live].double(), want[:live], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 64, 65, 130])
def test_decode_across_block_borders(context: int) -> None:
    check([(1, context)])
    check([(1, context), (1, 33)], padding=2)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (6, 2), (8, 1)])
def test_head_shapes(heads: tuple[int, int], head_dim: int) -> None:
    check([(1, 40)], heads=heads, head_dim=head_dim)
    check([(5, 37)], heads=heads, head_dim=head_dim, prefill=PrefillConfig(block_m=16, block_n=32))


@pytest.mark.parametrize("splits", [2, 8])
def test_decode_in_parts_some_of_them_empty(splits: int) -> None:
    config = DecodeConfig(block_n=16, programs_per_processor=64, max_splits=splits)
    check([(1, 3), (1, 100), (1, 64)], decode=config, padding=1)


def test_prefill_of_prompts_chunks_and_single_queries_in_one_batch() -> None:
    sequences = [(1, 50), (7, 7), (33, 70), (1, 1), (16, 16)]
    check(sequences, padding=3, prefill=PrefillConfig(block_m=32, block_n=16))
    check(sequences, dtype=torch.float32, heads=(6, 2))


def test_prefill_of_one_sequence_with_one_query_among_none() -> None:
    check([(40, 40)], padding=0)


@pytest.mark.parametrize("num_decodes", [0, 1, 3, 20])
def test_decodes_beside_prompts_in_as_many_parts_as_leave_room(num_decodes: int) -> None:
    """Few are cut into parts, many are not; padding sequences and tokens are none of either."""
    sequences = [(1, 7 * i + 1) for i in range(num_decodes)]
    sequences[1:1] = [(40, 90)]
    sequences += [(3, 3)]
    check(sequences, padding=30, heads=(4, 2))


def test_more_tiles_than_programs_walk_the_list() -> None:
    config = PrefillConfig(block_m=16, block_n=16)
    check([(70, 70), (1, 9), (2, 40)], padding=5, heads=(4, 1), prefill=config)


def test_a_prepared_plan_lists_decodes_and_tiles() -> None:
    plan, _ = make_plan([(5, 9), (1, 4), (1, 20), (2, 2)], padding=3)
    work = prepare(plan, group=4, dtype=torch.float16, config=PrefillConfig(block_m=8)).work
    assert work is not None and work.counts.tolist() == [2, 4]
    assert work.decodes[:2].tolist() == [1, 2]
    assert sorted(work.tiles[:4].tolist()) == [[0, 0], [0, 2], [0, 4], [3, 0]]
    decodes, _ = make_plan([(1, 9), (1, 4)])
    assert prepare(decodes, group=4, dtype=torch.float16).work is None
