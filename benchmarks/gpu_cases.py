"""Work of Llama-3.1-8B's shapes for the kernels' benchmarks: adapters, caches, plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.gpu import lora
from kernels.plans import BLOCK_SIZE, RANK_PAGE, AttentionPlan, LoraPlan, LoraPool

NUM_LAYERS = 32
HIDDEN, INTERMEDIATE, VOCAB = 4096, 14336, 128256
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (HIDDEN, (HIDDEN, 1024, 1024)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INTERMEDIATE, INTERMEDIATE)),
    "down": (INTERMEDIATE, (HIDDEN,)),
}
"""Each group of projections: input size, output sizes."""


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))


def make_pool(group: str, num_pages: int, dtype: torch.dtype = torch.bfloat16) -> LoraPool:
    size, outs = GROUPS[group]
    a = torch.randn(num_pages, len(outs), 16, size, dtype=dtype, device="cuda") / size**0.5
    b = torch.randn(num_pages, 16, sum(outs), dtype=dtype, device="cuda")
    return LoraPool(a, b, torch.rand(num_pages, len(outs), device="cuda") + 0.5, offsets(outs))


def make_lora_plan(ranks: Sequence[int], rows: Sequence[int], width: int) -> LoraPlan:
    """Adapter n has ``ranks[n]`` and ``rows[n]`` consecutive tokens; pages are dealt in order."""
    starts, table, page = [0], [], 0
    for rank, count in zip(ranks, rows, strict=True):
        starts.append(starts[-1] + count)
        owned = list(range(page, page + -(-rank // 16)))
        page += len(owned)
        table.append(owned + [-1] * (width - len(owned)))

    def device(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return LoraPlan(
        rows=torch.arange(starts[-1], dtype=torch.int32, device="cuda"),
        segment_starts=device(starts),
        segment_pages=device(table),
        segment_ranks=device(list(ranks)),
        num_rows=starts[-1],
        num_segments=len(ranks),
    )


def spread(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


@dataclass(frozen=True)
class LoraCase:
    """All layers' LoRA of one batch: static plan, and ``turn`` to give the adapters other pages."""

    plan: LoraPlan
    pools: list[dict[str, LoraPool]]
    x: dict[str, torch.Tensor]
    y: dict[str, torch.Tensor]
    num_pages: int

    def turn(self, i: int) -> None:
        """Moves every page number on, so that a replay finds its adapters in memory, not in a cache."""
        table = self.plan.segment_pages
        live = int((table >= 0).sum().item())
        table.copy_(torch.where(table >= 0, (table + live) % self.num_pages, table))

    def run(self, groups: Sequence[str] = tuple(GROUPS)) -> None:
        plan = lora.prepare(self.plan, self.num_tokens)
        for pools in self.pools:
            for group in groups:
                lora.apply_lora(self.x[group], self.y[group], pools[group], plan)

    @property
    def num_tokens(self) -> int:
        return self.x["o"].shape[0]

    @property
    def adapter_bytes(self) -> int:
        rank = int(self.plan.segment_ranks.sum())
        return 2 * rank * NUM_LAYERS * sum(len(outs) * size + sum(outs) for size, outs in GROUPS.values())


def lora_case(
    pools: list[dict[str, LoraPool]], ranks: Sequence[int], num_rows: int, width: int | None = None
) -> LoraCase:
    """Rows shared out evenly. The table of pages is as wide as the engine's graphs have it: 1 page, or 4."""
    width = width or (1 if max(ranks) <= RANK_PAGE else 4)

    def tensors(columns: Callable[[str], int]) -> dict[str, torch.Tensor]:
        return {g: torch.randn(num_rows, columns(g), dtype=torch.bfloat16, device="cuda") for g in GROUPS}

    return LoraCase(
        plan=make_lora_plan(ranks, spread(num_rows, len(ranks)), width),
        pools=pools,
        x=tensors(lambda g: GROUPS[g][0]),
        y=tensors(lambda g: sum(GROUPS[g][1])),
        num_pages=pools[0]["o"].a.shape[0],
    )


def attention_plan(queries: Sequence[int], contexts: Sequence[int]) -> tuple[AttentionPlan, int]:
    """A plan over shuffled blocks, and how many blocks it wants."""
    counts = [-(-c // BLOCK_SIZE) for c in contexts]
    ids = torch.randperm(sum(counts), dtype=torch.int32)
    table = torch.full((len(contexts), max(counts)), -1, dtype=torch.int32)
    slots, positions, used, starts = [], [], 0, [0]
    for s, (count, query, context) in enumerate(zip(counts, queries, contexts, strict=True)):
        table[s, :count] = ids[used : used + count]
        used += count
        position = torch.arange(context - query, context)
        positions.append(position)
        slots.append(table[s].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(starts[-1] + query)
    plan = AttentionPlan(
        query_starts=torch.tensor(starts, dtype=torch.int32, device="cuda"),
        context_lens=torch.tensor(list(contexts), dtype=torch.int32, device="cuda"),
        block_tables=table.cuda(),
        slots=torch.cat(slots).cuda(),
        positions=torch.cat(positions).cuda(),
        max_query_len=max(queries),
    )
    return plan, sum(counts)


def padded(plan: AttentionPlan, *, num_tokens: int, num_seqs: int) -> AttentionPlan:
    """The plan with room for more, as a captured step has it."""
    more_tokens = num_tokens - plan.slots.shape[0]
    more_seqs = num_seqs - plan.context_lens.shape[0]

    def longer(values: torch.Tensor, count: int, padding: int) -> torch.Tensor:
        return torch.cat([values, values.new_full((count, *values.shape[1:]), padding)])

    return replace(
        plan,
        query_starts=longer(plan.query_starts, more_seqs, int(plan.query_starts[-1])),
        context_lens=longer(plan.context_lens, more_seqs, 0),
        block_tables=longer(plan.block_tables, more_seqs, -1),
        slots=longer(plan.slots, more_tokens, -1),
        positions=longer(plan.positions, more_tokens, 0),
        max_query_len=num_tokens,
    )


def kv_caches(num_blocks: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """[2, num_blocks, heads, 16, head_dim] of each layer: keys, values."""
    shape = (2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(layers)]
