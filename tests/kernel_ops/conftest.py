"""Builders of ragged batches for the kernels' tests. Memory that nothing may read holds NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from kernels.plans import BLOCK_SIZE, RANK_PAGE, AttentionPlan, LoraPlan, LoraPool

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Heads:
    """The shape of one attention layer."""

    query: int
    kv: int
    dim: int


@dataclass
class AttentionCase:
    """A batch of sequences whose keys and values before this step's are in the cache already."""

    heads: Heads
    plan: AttentionPlan
    qkv: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cos_sin: torch.Tensor
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = self.heads.dim**-0.5


def _block_tables(contexts: list[int], num_blocks: int, padding: int, rng: torch.Generator) -> torch.Tensor:
    """Blocks anywhere in the pool; one column and ``padding`` rows more than needed, of -1."""
    free = torch.randperm(num_blocks, generator=rng).tolist()
    width = max(-(-context // BLOCK_SIZE) for context in contexts) + 1
    tables = torch.full((len(contexts) + padding, width), -1, dtype=torch.int32)
    for s, context in enumerate(contexts):
        for b in range(-(-context // BLOCK_SIZE)):
            tables[s, b] = free.pop()
    return tables


def build_attention_case(
    shape: tuple[int, int, int],
    rows: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    seed: int = 0,
) -> AttentionCase:
    """A batch of heads ``shape``: (query heads, K/V heads, head dim).

    ``rows`` are (queries, context after this step) of each sequence. ``padding`` adds that many rows to the
    flat batch and as many sequences, all marked as padding.
    """
    rng, heads = torch.Generator().manual_seed(seed), Heads(*shape)
    queries, contexts = [q for q, _ in rows], [c for _, c in rows]
    num_blocks = sum(-(-context // BLOCK_SIZE) for context in contexts) + 3
    tables = _block_tables(contexts, num_blocks, padding, rng)
    tokens = sum(queries) + padding
    slots, positions = torch.full((tokens,), -1), torch.zeros(tokens, dtype=torch.int64)
    cache_shape = (num_blocks, heads.kv, BLOCK_SIZE, heads.dim)
    k_cache, v_cache = (torch.full(cache_shape, float("nan"), dtype=dtype) for _ in range(2))
    flat = 0
    for s, (count, context) in enumerate(rows):
        for position in range(context):
            block, offset = int(tables[s, position // BLOCK_SIZE]), position % BLOCK_SIZE
            if position >= context - count:
                slots[flat], positions[flat] = block * BLOCK_SIZE + offset, position
                flat += 1
                continue
            for cache in (k_cache, v_cache):
                cache[block, :, offset] = torch.randn(heads.kv, heads.dim, generator=rng).to(dtype)
    starts = torch.tensor([0, *queries, *[0] * padding]).cumsum(0).to(torch.int32)
    plan = AttentionPlan(
        starts,
        torch.tensor([*contexts, *[0] * padding], dtype=torch.int32),
        tables,
        slots,
        positions,
        max(queries),
    )
    qkv = torch.randn(tokens, (heads.query + 2 * heads.kv) * heads.dim, generator=rng).to(dtype)
    qkv[flat:] = float("nan")
    angles = torch.rand(max(contexts), heads.dim // 2, generator=rng) * 6.28
    return AttentionCase(heads, plan, qkv, k_cache, v_cache, torch.cat((angles.cos(), angles.sin()), dim=1))


@dataclass
class LoraCase:
    """Adapters in a pool whose other pages hold NaN, and the rows that they apply to."""

    pool: LoraPool
    plan: LoraPlan
    x: torch.Tensor
    y: torch.Tensor


def _lora_pool(
    ranks: list[int],
    pages: torch.Tensor,
    widths: tuple[int, list[int]],
    dtype: torch.dtype,
    rng: torch.Generator,
) -> LoraPool:
    in_features, outputs = widths
    num_pages = int(pages.max()) + 2
    a = torch.full((num_pages, len(outputs), RANK_PAGE, in_features), float("nan"), dtype=dtype)
    b = torch.full((num_pages, RANK_PAGE, sum(outputs)), float("nan"), dtype=dtype)
    scales = torch.full((num_pages, len(outputs)), float("nan"))
    for n, rank in enumerate(ranks):
        for p, page in enumerate(pages[n].tolist()):
            live = min(RANK_PAGE, rank - p * RANK_PAGE)
            if live > 0:
                a[page, :, :live] = torch.randn(len(outputs), live, in_features, generator=rng).to(dtype)
                b[page, :live] = torch.randn(live, sum(outputs), generator=rng).to(dtype)
                scales[page] = torch.rand(len(outputs), generator=rng) + 0.5
    splits = tuple(torch.tensor([0, *outputs]).cumsum(0).tolist())
    return LoraPool(a * in_features**-0.5, b, scales, splits)


def build_lora_case(
    adapters: list[tuple[int, list[int]]],
    *,
    in_features: int,
    outputs: list[int],
    tokens: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LoraCase:
    """``adapters`` are (rank, flat rows) of each; rows that no adapter has belong to the base model."""
    rng = torch.Generator().manual_seed(seed)
    ranks = [rank for rank, _ in adapters]
    counts = [-(-rank // RANK_PAGE) for rank in ranks]
    ids = torch.randperm(sum(counts) + 2, generator=rng).tolist()
    pages = torch.full((len(adapters), max(counts)), -1, dtype=torch.int32)
    for n, count in enumerate(counts):
        pages[n, :count] = torch.tensor([ids.pop() for _ in range(count)])
    groups = [rows for _, rows in adapters]
    flat = [row for rows in groups for row in rows]
    plan = LoraPlan(
        torch.tensor(flat, dtype=torch.int32),
        torch.tensor([0, *map(len, groups)]).cumsum(0).to(torch.int32),
        pages,
        torch.tensor(ranks, dtype=torch.int32),
        len(flat),
        len(adapters),
    )
    x = torch.randn(tokens, in_features, generator=rng).to(dtype)
    y = torch.randn(tokens, sum(outputs), generator=rng).to(dtype)
    return LoraCase(_lora_pool(ranks, pages, (in_features, outputs), dtype, rng), plan, x, y)


@pytest.fixture
def attention_case() -> Callable[..., AttentionCase]:
    return build_attention_case


@pytest.fixture
def lora_case() -> Callable[..., LoraCase]:
    return build_lora_case


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def tolerance(dtype: torch.dtype) -> float:
    """How far a result may be from the float64 reference, absolute and relative."""
    return TOLERANCE[dtype]


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """``torch.empty`` gives NaN, and the largest integers, for the length of a test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads; undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
