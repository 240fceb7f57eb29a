"""Random requests of all kinds of sampling, served by the loop over a real runner, stepped by hand."""

from __future__ import annotations

import random
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.adapter_tiers import AdapterTiers
from engine.beams import BeamOptions
from engine.block_pool import BlockPool
from engine.constraints import Grammar
from engine.loop import EngineLoop
from engine.model.adapter_reading import read_adapter
from engine.model.adapter_weights import HostAdapter
from engine.model.loading import LoadedModel
from engine.outputs import LinkOutput
from engine.rank_pages import RankPages
from engine.runner import Runner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.scheduler.background import account_name
from engine.sequence import FinishReason, Request
from engine.step import SamplingParams, TokenLogprobs
from kernels.native import release_threads

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 8, 48
ENDS_BYTES = 1 << 24
NUM_REQUESTS = 12
Key = tuple[int, int]
"""A request and a choice."""


WISHES = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, presence_penalty=0.6, frequency_penalty=0.4),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=1.2, top_k=20, frequency_penalty=1.0, repetition_penalty=1.1),
    SamplingParams(logit_bias=((5, 4.0), (9, 3.5)), logprobs=2),
    SamplingParams(temperature=0.7, min_p=0.05, logprobs=0),
]


def grammar_of(number: int, num_grammars: int) -> int | None:
    """Which of the grammars a request must fit; None: it is free."""
    return None if number % 2 else number // 2 % num_grammars


def random_request(rng: random.Random, number: int, vocab_size: int, digest: bytes) -> Request:
    params = rng.choice(WISHES)
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 60))]
    stop = frozenset(rng.sample(range(vocab_size), 30)) if rng.random() < 0.5 else frozenset()
    return Request(
        link="link",
        request_id=number,
        prompt=prompt,
        sampling=tuple(replace(params, seed=number * 10 + k) for k in range(rng.choice((1, 1, 3)))),
        max_len=len(prompt) + rng.randrange(1, 40),
        block_root=b"root" + digest,
        adapter_digest=digest,
        stop_token_ids=stop,
        min_tokens=rng.choice((0, 0, 6)),
    )


def company(vocab_size: int, digests: Sequence[bytes], seed: int) -> list[Request]:
    """Background work that fills all seats; then searches and greedy requests, of adapters in turn."""
    rng = random.Random(seed)
    found: list[Request] = []
    for number in range(MAX_NUM_SEQS + 9):
        is_background = number < MAX_NUM_SEQS
        width = 1 if is_background or number % 3 == 1 else rng.choice((2, 3, 4))
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(10, 60))]
        count = rng.randrange(20, 40)
        digest = b"" if is_background else digests[number % len(digests)]
        beams = BeamOptions(width, count, frozenset(rng.sample(range(vocab_size), 3))) if width > 1 else None
        found.append(
            Request(
                link="link",
                request_id=number,
                prompt=prompt,
                sampling=(SamplingParams(logprobs=beams.num_candidates if beams else None),) * width,
                max_len=len(prompt) + count,
                block_root=b"root" + digest,
                adapter_digest=digest,
                stop_token_ids=beams.end_tokens if beams else frozenset(),
                beams=beams,
                tenant=account_name("tenant", background=is_background),
            )
        )
    return found


@dataclass
class Served:
    """What came of all choices of all requests."""

    tokens: dict[Key, list[int]] = field(default_factory=dict)
    logprobs: dict[Key, list[float]] = field(default_factory=dict)
    ends: dict[Key, FinishReason] = field(default_factory=dict)
    prompts: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By request: of its prompt's tokens but the first."""
    cached: dict[int, int] = field(default_factory=dict)
    """By request: tokens of its prompt that were cached."""
    num_preemptions: int = 0
    num_yields: int = 0
    num_steps: int = 0

    def deliver(self, outputs: Mapping[Hashable, LinkOutput]) -> None:
        for out in outputs.values():
            for prompt in out.prompts:
                known = self.prompts.setdefault(prompt.request_id, [])
                assert prompt.start == 1 + len(known), "told twice, or not in order"
                assert (prompt.request_id, 0) not in self.tokens, "told after a token"
                known += prompt.tokens
            for request_id, choice, token, logprobs in zip(
                out.request_ids, out.choices, out.tokens, out.logprobs, strict=True
            ):
                self.tokens.setdefault((request_id, choice), []).append(token)
                if logprobs is not None:
                    self.logprobs.setdefault((request_id, choice), []).append(logprobs.chosen)
            self.cached.update({start.request_id: start.cached_tokens for start in out.started})
            self.ends.update({(end.request_id, end.choice): end.reason for end in out.finished})


def serve(
    model: LoadedModel,
    runner: Runner,
    seed: int,
    *,
    num_blocks: int,
    overlap: bool,
    folders: Mapping[bytes, Path],
    num_pages: int,
    grammars: Sequence[Grammar] = (),
) -> Served:
    """Answers requests that come two at a time, under the adapters in ``folders`` (none for b"") in turn.

    With ``grammars``, every second request must fit one of them, in turn: see `grammar_of`.
    """
    rng = random.Random(seed)
    digests = [b"", *folders]
    requests = [
        random_request(rng, number, model.config.vocab_size, digests[number % len(digests)])
        for number in range(NUM_REQUESTS)
    ]
    for number, request in enumerate(requests if grammars else ()):
        which = grammar_of(number, len(grammars))
        request.grammar = None if which is None else grammars[which]
    return serve_requests(
        model, runner, requests, num_blocks=num_blocks, overlap=overlap, folders=folders, num_pages=num_pages
    )


def serve_requests(
    model: LoadedModel,
    runner: Runner,
    requests: list[Request],
    *,
    num_blocks: int,
    overlap: bool,
    folders: Mapping[bytes, Path],
    num_pages: int,
    at_once: int = 2,
) -> Served:
    """Answers requests that come ``at_once`` at a time."""
    requests = list(requests)
    news = threading.Event()

    def read(digest: bytes) -> HostAdapter:
        try:
            return read_adapter(folders[digest], model.network, pin=model.device.type == "cuda")
        finally:
            release_threads()

    tiers = AdapterTiers(read, num_pages=num_pages, host_bytes=1, ends_bytes=ENDS_BYTES, wake=news.set)
    pages = RankPages(num_pages, ends_bytes=ENDS_BYTES)
    gate = AdapterGate(pages, tiers, runner.write_adapter, runner.drop_adapter)
    limits = SchedulerLimits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    scheduler = Scheduler(limits, BlockPool(num_blocks), gate)
    loop = EngineLoop(scheduler, runner, gate, news, overlap=overlap)
    served = Served()
    while requests or scheduler.num_running or scheduler.num_waiting:
        for request in requests[:at_once]:
            loop.submit(request)
        del requests[:at_once]
        served.num_steps += 1
        if not loop.step(served.deliver):
            news.wait(0.01)
            news.clear()
    while loop.step(served.deliver):
        pass
    scheduler.check()
    assert scheduler.num_free_blocks == num_blocks
    tiers.close()
    served.num_preemptions = scheduler.num_preemptions
    served.num_yields = int(scheduler.figures()["seat_yields"])
    return served
