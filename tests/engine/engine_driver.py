"""A whole engine without its server: scheduler, pools, adapter loads and the real runner."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.adapter_tiers import AdapterTiers
from engine.block_pool import BlockPool, root_hash
from engine.launched_step import LaunchedStep
from engine.model.adapter_reading import read_as_stored
from engine.model.adapter_weights import HostAdapter
from engine.model.loading import LoadedModel
from engine.rank_pages import RankPages
from engine.runner import Runner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.sequence import Request
from engine.step import Pooling, SamplingParams, StepPlan
from tests.oracles import Answer

LOAD_TIMEOUT_S = 30.0
ENDS_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Ask:
    """A greedy request; ``adapter`` is a key of the engine's folders, None for the base model."""

    adapter: str | None
    prompt: tuple[int, ...]
    max_tokens: int
    adapter_start: int = 0
    """The first position that the adapter applies to."""
    pooling: Pooling | None = None
    """Set: the prompt's vector is asked for, and no token."""


class EngineDriver:
    """Answers requests that all come at once. Adapters are read when the first request for one comes.

    Args:
        overlap: plan and launch each step before the result of the one before is taken in.
    """

    def __init__(
        self,
        model: LoadedModel,
        folders: Mapping[str, Path],
        *,
        num_blocks: int,
        num_rank_pages: int,
        limits: SchedulerLimits,
        overlap: bool = False,
    ) -> None:
        self._model = model
        self._runner = Runner(model, num_blocks=num_blocks, num_rank_pages=num_rank_pages)
        self._news = threading.Event()
        self._under_way: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self._most_under_way = 1 if overlap else 0

        def read(digest: bytes) -> HostAdapter:
            return read_as_stored(folders[digest.decode()], model.network)

        self._tiers = AdapterTiers(
            read,
            num_pages=num_rank_pages,
            host_bytes=1 << 30,
            ends_bytes=ENDS_BYTES,
            wake=self._news.set,
        )
        gate = AdapterGate(
            RankPages(num_rank_pages, ends_bytes=ENDS_BYTES),
            self._tiers,
            self._runner.write_adapter,
            self._runner.drop_adapter,
        )
        self.scheduler = Scheduler(limits, BlockPool(num_blocks), gate)
        self.num_cached_tokens = 0
        self.vectors: dict[int, np.ndarray] = {}
        """Of the last run, by the place of their asks."""

    def run(self, asks: Sequence[Ask]) -> list[Answer]:
        """All answers, in order. Raises AssertionError if one ends in an error."""
        for i, ask in enumerate(asks):
            self.scheduler.add(self._request(i, ask))
        tokens: list[list[int]] = [[] for _ in asks]
        num_finished, self.vectors = 0, {}
        while num_finished < len(asks):
            self._step()
            for output in self.scheduler.take_outputs().values():
                for request_id, token in zip(output.request_ids, output.tokens, strict=True):
                    tokens[request_id].append(token)
                for vector in output.vectors:
                    self.vectors[vector.request_id] = np.frombuffer(vector.values, "<f4")
                self.num_cached_tokens += sum(started.cached_tokens for started in output.started)
                assert not any(finished.error for finished in output.finished), output.finished
                num_finished += len(output.finished)
        self.scheduler.check()
        return [
            Answer(ask.adapter, ask.prompt, tuple(found)) for ask, found in zip(asks, tokens, strict=True)
        ]

    def close(self) -> None:
        """End the threads that load adapters."""
        self._tiers.close()

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        if plan.rows:
            self._under_way.append((plan, self._runner.submit(plan)))
        if self._under_way and (not plan.rows or len(self._under_way) > self._most_under_way):
            done, pending = self._under_way.popleft()
            self.scheduler.update(done, pending.result())
            if self._under_way:
                self._under_way[-1][1].draw()
        elif not plan.rows and self.scheduler.is_loading:
            assert self._news.wait(LOAD_TIMEOUT_S), "an adapter's load does not end"
            self._news.clear()

    def _request(self, request_id: int, ask: Ask) -> Request:
        digest = (ask.adapter or "").encode()
        dtype = str(self._model.dtype)
        return Request(
            link="link",
            request_id=request_id,
            prompt=ask.prompt,
            sampling=(SamplingParams(),),
            max_len=len(ask.prompt) + ask.max_tokens,
            block_root=root_hash(self._model.digest, dtype, b"" if ask.adapter_start else digest, b"scope"),
            adapter_digest=digest,
            adapter_start=ask.adapter_start,
            pooling=ask.pooling,
            prompt_only=ask.pooling is not None,
            tenant=ask.adapter or "base",
            arrival=time.monotonic(),
        )
