"""The real runner on a CPU, stepped with and without a step under way: the same text, whatever is sampled."""

from __future__ import annotations

import random
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from engine.adapter_tiers import AdapterTiers
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.model.loading import LoadedModel, load_model
from engine.outputs import LinkOutput
from engine.rank_pages import RankPages
from engine.runner import Runner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.sequence import FinishReason, Request
from engine.step import SamplingParams
from tests.model_zoo import save_tiny_model

VOCAB = 320
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return load_model(str(folder), dtype="float32", device="cpu", max_model_len=None)


def random_request(rng: random.Random, number: int) -> Request:
    params = rng.choice(WISHES)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
    stop = frozenset(rng.sample(range(VOCAB), 30)) if rng.random() < 0.5 else frozenset()
    return Request(
        link="link",
        request_id=number,
        prompt=prompt,
        sampling=tuple(replace(params, seed=number * 10 + k) for k in range(rng.choice((1, 1, 3)))),
        max_len=len(prompt) + rng.randrange(1, 40),
        block_root=b"root",
        stop_token_ids=stop,
        min_tokens=rng.choice((0, 0, 6)),
    )


@dataclass
class Served:
    """What came of all choices of all requests."""

    tokens: dict[Key, list[int]] = field(default_factory=dict)
    logprobs: dict[Key, list[float]] = field(default_factory=dict)
    ends: dict[Key, FinishReason] = field(default_factory=dict)
    num_preemptions: int = 0

    def deliver(self, outputs: Mapping[Hashable, LinkOutput]) -> None:
        for out in outputs.values():
            for request_id, choice, token, logprobs in zip(
                out.request_ids, out.choices, out.tokens, out.logprobs, strict=True
            ):
                self.tokens.setdefault((request_id, choice), []).append(token)
                if logprobs is not None:
                    self.logprobs.setdefault((request_id, choice), []).append(logprobs.chosen)
            self.ends.update({(end.request_id, end.choice): end.reason for end in out.finished})


def serve(model: LoadedModel, seed: int, *, num_blocks: int, overlap: bool) -> Served:
    """Answers requests that come two at a time."""
    rng = random.Random(seed)
    requests = [random_request(rng, number) for number in range(12)]
    news = threading.Event()
    tiers = AdapterTiers(lambda digest: pytest.fail("no adapters here"), num_pages=1, host_bytes=1)
    runner = Runner(model, num_blocks=num_blocks, num_rank_pages=1)
    gate = AdapterGate(RankPages(1), tiers, runner.write_adapter)
    scheduler = Scheduler(SchedulerLimits(8, 48), BlockPool(num_blocks), gate)
    loop = EngineLoop(scheduler, runner, gate, news, overlap=overlap)
    served = Served()
    while requests or scheduler.num_running or scheduler.num_waiting:
        for request in requests[:2]:
            loop.submit(request)
        del requests[:2]
        loop.step(served.deliver)
    while loop.step(served.deliver):
        pass
    scheduler.check()
    assert scheduler.num_free_blocks == num_blocks
    tiers.close()
    served.num_preemptions = scheduler.num_preemptions
    return served


@pytest.mark.parametrize("seed", range(3))
def test_the_same_text_with_a_step_under_way(model: LoadedModel, seed: int) -> None:
    want = serve(model, seed, num_blocks=120, overlap=False)
    assert set(want.ends.values()) == {FinishReason.STOP, FinishReason.LENGTH} and want.logprobs
    for num_blocks in (120, 12):
        got = serve(model, seed, num_blocks=num_blocks, overlap=True)
        assert (got.num_preemptions > 0) == (num_blocks == 12)
        assert (got.tokens, got.ends) == (want.tokens, want.ends)
        for key, logprobs in want.logprobs.items():
            assert got.logprobs[key] == pytest.approx(logprobs, abs=1e-3)
