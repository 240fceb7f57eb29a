"""The least scheduler that a Runner can be driven with: no preemption, no prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.runner import Runner
from engine.step import RowResult, SamplingParams, StepAdapter, StepPlan, StepRow
from kernels.plans import BLOCK_SIZE


@dataclass(slots=True)
class Request:
    """A prompt to continue; ``tokens`` and ``error`` are filled by the driver."""

    prompt: Sequence[int]
    adapter: StepAdapter | None = None
    max_tokens: int = 16
    sampling: SamplingParams = field(default_factory=SamplingParams)
    adapter_start: int = 0
    tokens: list[int] = field(default_factory=list)
    results: list[RowResult] = field(default_factory=list)
    error: str | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    @property
    def finished(self) -> bool:
        return self.error is not None or len(self.tokens) == self.max_tokens


class StepDriver:
    """Runs requests together: decodes first, then prefill chunks in what is left of the token budget.

    Blocks are handed out one at a time, last freed first, so that tables are scattered and freed blocks are
    reused at once with whatever they hold.
    """

    def __init__(self, runner: Runner, num_blocks: int, *, token_budget: int = 64) -> None:
        self._runner = runner
        self._free = list(range(num_blocks))
        self._token_budget = token_budget

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Decode until all have finished; their tokens in order."""
        while any(not request.finished for request in requests):
            self.step(requests)
        return [request.tokens for request in requests]

    def step(self, requests: Sequence[Request]) -> None:
        """One step over the requests that are not finished."""
        budget = self._token_budget
        rows: list[StepRow] = []
        owners: dict[int, Request] = {}
        live = [(i, request) for i, request in enumerate(requests) if not request.finished]
        live.sort(key=lambda item: len(item[1].known) - item[1].computed > 1)
        for seq_id, request in live:
            count = min(budget, len(request.known) - request.computed)
            if count > 0:
                budget -= count
                owners[seq_id] = request
                rows.append(self._row(seq_id, request, count))
        for result in self._runner.execute(StepPlan(tuple(rows))).rows:
            self._record(owners[result.seq_id], result)

    def _row(self, seq_id: int, request: Request, count: int) -> StepRow:
        start = request.computed
        request.computed += count
        while len(request.blocks) * BLOCK_SIZE < request.computed:
            request.blocks.append(self._free.pop())
        samples = request.computed == len(request.known)
        return StepRow(
            seq_id,
            request.known[start : request.computed],
            start,
            tuple(request.blocks),
            adapter=request.adapter,
            adapter_start=request.adapter_start,
            sampling=request.sampling if samples else None,
            prompt_tokens=tuple(request.prompt),
            output_tokens=tuple(request.tokens),
        )

    def _record(self, request: Request, result: RowResult) -> None:
        request.results.append(result)
        if result.error is not None:
            request.error = result.error
        else:
            request.tokens.append(result.token)
        if request.finished:
            self._free.extend(request.blocks)
            request.blocks = []
