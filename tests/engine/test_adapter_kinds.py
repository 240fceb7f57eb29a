"""Every kind of adapter that PEFT writes, answered as PEFT answers, in whatever company."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.model.adapter_reading import read_adapter, read_as_stored
from engine.model.adapter_weights import HostAdapter
from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.scheduler import SchedulerLimits
from engine.step import SamplingParams, StepAdapter
from tests.adapter_kinds import KINDS, LINEAR, Kind, differences, save_kind, vocab_size
from tests.engine.engine_driver import Ask, EngineDriver
from tests.engine.step_driver import Request, StepDriver
from tests.model_zoo import save_tiny_model
from tests.oracles import Answer, assert_only_ties

NUM_BLOCKS = 64
NUM_PAGES = 20
PAGES = (2, 5, 1, *range(6, NUM_PAGES))
"""Room for an adapter of any kind, out of order."""
FAMILIES: dict[str, tuple[Any, Any, bool]] = {
    "llama, tied": (LlamaForCausalLM, LlamaConfig, True),
    "llama, untied": (LlamaForCausalLM, LlamaConfig, False),
    "qwen2, untied": (Qwen2ForCausalLM, Qwen2Config, False),
    "qwen3, tied": (Qwen3ForCausalLM, Qwen3Config, True),
}


@dataclass(frozen=True)
class Zoo:
    """A base model and an adapter of each kind over it."""

    model: PreTrainedModel
    loaded: LoadedModel
    folders: Mapping[str, Path]

    def prompt(self, name: str | None, length: int, seed: int) -> tuple[int, ...]:
        """Random tokens of an adapter's whole vocabulary; of the added ones, the last is among them."""
        size = vocab_size(self.model, KINDS.get(name or ""))
        tokens = random.Random(seed).choices(range(3, size), k=length)
        if size > self.model.config.vocab_size:
            tokens[1] = size - 1
        return tuple(tokens)


def make_zoo(folder: Path, family: str) -> Zoo:
    model_class, config_class, tied = FAMILIES[family]
    model = save_tiny_model(
        folder / "model", model_class=model_class, config_class=config_class, tie_word_embeddings=tied
    )
    loaded = load_model(str(folder / "model"), dtype="float32", device="cpu", max_model_len=None)
    folders = {
        name: save_kind(model, folder / name, kind, seed=i) for i, (name, kind) in enumerate(KINDS.items())
    }
    return Zoo(model, loaded, folders)


@pytest.fixture(scope="module", params=FAMILIES)
def each_zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return make_zoo(tmp_path_factory.mktemp("zoo"), request.param)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return make_zoo(tmp_path_factory.mktemp("zoo"), "llama, untied")


def place(
    runner: Runner, model: LoadedModel, folder: Path, pages: tuple[int, ...], number: int
) -> StepAdapter:
    """Write an adapter into the first of ``pages``, as many as it takes."""
    weights = read_as_stored(folder, model.network)
    own = pages[: weights.num_pages]
    runner.write_adapter(own, weights)
    return StepAdapter(
        number, own, weights.rank, weights.has_vectors, weights.ends_bytes > 0, weights.vocab_size
    )


def test_all_kinds_in_one_engine_answer_as_peft_does(each_zoo: Zoo) -> None:
    """Through the scheduler: cached prefixes, chunks, too few blocks for all and too few pages for all."""
    zoo = each_zoo
    engine = EngineDriver(
        zoo.loaded,
        zoo.folders,
        num_blocks=NUM_BLOCKS,
        num_rank_pages=NUM_PAGES,
        limits=SchedulerLimits(max_num_seqs=24, max_num_batched_tokens=48),
    )
    asks = []
    for name in (None, *zoo.folders):
        long = zoo.prompt(name, 70, seed=1)
        asks += [Ask(name, ids, 12) for ids in (zoo.prompt(name, 5, seed=2), long, (*long[:40], 9))]
    random.Random(0).shuffle(asks)
    answers = engine.run(asks)
    engine.close()
    assert engine.num_cached_tokens > 0
    assert_only_ties(differences(zoo.model, KINDS, zoo.folders, answers))
    base = zoo.model.config.vocab_size
    assert any(token >= base for answer in answers for token in answer.tokens), "no added token was drawn"


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_changes_the_answer_and_is_alone_the_same(zoo: Zoo, name: str) -> None:
    runner = Runner(zoo.loaded, num_blocks=NUM_BLOCKS, num_rank_pages=NUM_PAGES)
    adapter = place(runner, zoo.loaded, zoo.folders[name], PAGES, 1)
    ids = zoo.prompt(None, 30, seed=3)
    own, base = Request(ids, adapter, max_tokens=12), Request(ids, max_tokens=12)
    StepDriver(runner, NUM_BLOCKS, token_budget=16).run([own, base])
    assert own.tokens != base.tokens
    answers = [Answer(name, ids, tuple(own.tokens)), Answer(None, ids, tuple(base.tokens))]
    assert_only_ties(differences(zoo.model, KINDS, {name: zoo.folders[name]}, answers))


def bits(requests: Sequence[Request]) -> tuple[list[list[int]], list[float]]:
    """Tokens, and every log-probability that was asked for."""
    found = [r.logprobs for request in requests for r in request.results if r.logprobs is not None]
    return [request.tokens for request in requests], [x for one in found for x in one.top_logprobs]


def run_beside(zoo: Zoo, runner: Runner, beside: StepAdapter | None, plain: StepAdapter) -> Any:
    """Base requests and one under ``plain``; among them one with ``beside``.

    That one is for a single token, so that the batches are of the same sizes also when it ends in an error:
    others yield other bits.
    """
    sampling = SamplingParams(logprobs=5)
    requests = [
        Request(zoo.prompt(None, 20, seed), owner, max_tokens=1 if seed == 1 else 8, sampling=sampling)
        for seed, owner in enumerate((None, beside, None, plain, None))
    ]
    StepDriver(runner, NUM_BLOCKS, token_budget=30).run(requests)
    return requests[1], bits([request for i, request in enumerate(requests) if i != 1])


def poison(weights: HostAdapter) -> HostAdapter:
    """The same adapter with NaN for every weight that is not zero."""
    tensors = [t for group in weights.groups.values() for t in (group.a, group.b)]
    for end in (weights.ends.embedding, weights.ends.lm_head) if weights.ends else ():
        if end is not None:
            tensors += [end.replaced.rows] if end.replaced else []
            tensors += [t for t in (end.a, end.b, end.gain, end.shift) if t is not None]
    for tensor in tensors:
        tensor[tensor != 0] = float("nan")
    return weights


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_that_yields_nan_spoils_only_its_own_request(zoo: Zoo, name: str) -> None:
    runner = Runner(zoo.loaded, num_blocks=NUM_BLOCKS, num_rank_pages=NUM_PAGES)
    plain = place(runner, zoo.loaded, zoo.folders["plain r8"], (0,), 1)
    _, expected = run_beside(zoo, runner, None, plain)
    adapter = place(runner, zoo.loaded, zoo.folders[name], PAGES, 2)
    fine, beside_fine = run_beside(zoo, runner, adapter, plain)
    assert fine.error is None and beside_fine == expected
    weights = read_adapter(zoo.folders[name], zoo.loaded.network, pin=False)
    runner.write_adapter(adapter.pages, poison(weights))
    bad, beside_bad = run_beside(zoo, runner, adapter, plain)
    assert bad.error is not None and "not finite" in bad.error
    assert beside_bad == expected
    # The blocks that it freed, with NaN in them, are the next to be handed out.
    assert run_beside(zoo, runner, None, plain)[1] == expected


@pytest.mark.parametrize("first", ["dora r16 over patterns", "bias r15", "dora everywhere", "saved", "r64"])
@pytest.mark.parametrize("second", ["plain r8", "bias r4", "lora after"])
def test_in_the_pages_of_another_an_adapter_answers_as_on_a_fresh_server(
    zoo: Zoo, tmp_path: Path, first: str, second: str
) -> None:
    if first == "r64":
        before = save_kind(zoo.model, tmp_path / "r64", Kind(64, LINEAR), seed=9)
    else:
        before = zoo.folders[first]
    ids = zoo.prompt(None, 25, seed=4)

    def answer(runner: Runner) -> Any:
        adapter = place(runner, zoo.loaded, zoo.folders[second], PAGES, 2)
        requests = [
            Request(ids, owner, max_tokens=10, sampling=SamplingParams(logprobs=5))
            for owner in (adapter, None)
        ]
        StepDriver(runner, NUM_BLOCKS).run(requests)
        return bits(requests)

    used = Runner(zoo.loaded, num_blocks=NUM_BLOCKS, num_rank_pages=NUM_PAGES)
    driver = StepDriver(used, NUM_BLOCKS)
    driver.run([Request(ids, place(used, zoo.loaded, before, PAGES, 1), max_tokens=4)])
    assert answer(used) == answer(Runner(zoo.loaded, num_blocks=NUM_BLOCKS, num_rank_pages=NUM_PAGES))


class TestSamplingFromAWiderVocabulary:
    """Added tokens are drawn by their adapter's rows, at PEFT's odds, and by nobody else's."""

    def requests(self, zoo: Zoo, runner: Runner, sampling: SamplingParams) -> tuple[list[Request], int]:
        """Five under the adapter, five of the base; and the size of the base's vocabulary."""
        adapter = place(runner, zoo.loaded, zoo.folders["added tokens"], (0,), 1)
        ids = zoo.prompt(None, 8, seed=5)
        return [
            Request(ids, owner, max_tokens=30, sampling=replace(sampling, seed=seed))
            for seed, owner in enumerate([adapter, None] * 5)
        ], zoo.model.config.vocab_size

    def test_only_the_adapters_rows_draw_them(self, zoo: Zoo) -> None:
        runner = Runner(zoo.loaded, num_blocks=NUM_BLOCKS, num_rank_pages=1)
        requests, base = self.requests(zoo, runner, SamplingParams(temperature=50.0))
        StepDriver(runner, NUM_BLOCKS).run(requests)
        drawn = [sum(token >= base for token in request.tokens) for request in requests]
        assert sum(drawn[::2]) > 0 and sum(drawn[1::2]) == 0

    def test_a_bias_on_them_counts_for_the_adapters_rows(self, zoo: Zoo) -> None:
        runner = Runner(zoo.loaded, num_blocks=NUM_BLOCKS, num_rank_pages=1)
        sampling = SamplingParams(temperature=1.0, top_p=0.9, logit_bias=((322, 1000.0),))
        requests, base = self.requests(zoo, runner, sampling)
        StepDriver(runner, NUM_BLOCKS).run(requests)
        assert all(set(request.tokens) == {322} for request in requests[::2])
        assert all(token < base for request in requests[1::2] for token in request.tokens)

    @pytest.mark.parametrize("temperature", [0.0, 1.5])
    def test_base_rows_have_the_same_bits_beside_them(self, zoo: Zoo, temperature: float) -> None:
        runner = Runner(zoo.loaded, num_blocks=NUM_BLOCKS, num_rank_pages=1)
        sampling = SamplingParams(temperature=temperature, top_p=0.95, top_k=40, logprobs=5)
        mixed, _ = self.requests(zoo, runner, sampling)
        alone = [replace(request, adapter=None) for request in mixed]
        StepDriver(runner, NUM_BLOCKS).run(mixed)
        StepDriver(runner, NUM_BLOCKS).run(alone)
        assert bits(mixed[1::2]) == bits(alone[1::2])

    def test_log_probabilities_are_over_the_whole_vocabulary(self, zoo: Zoo) -> None:
        runner = Runner(zoo.loaded, num_blocks=NUM_BLOCKS, num_rank_pages=1)
        size = vocab_size(zoo.model, KINDS["added tokens"])
        requests, base = self.requests(zoo, runner, SamplingParams(logprobs=size))
        StepDriver(runner, NUM_BLOCKS).run(requests)
        for request, own in ((requests[0], size), (requests[1], base)):
            found = request.results[0].logprobs
            assert found is not None
            finite = [value for value in found.top_logprobs if value > float("-inf")]
            assert len(finite) == own
            assert sum(map(math.exp, finite)) == pytest.approx(1, abs=1e-4)


def test_bfloat16_is_near(zoo: Zoo) -> None:
    """DoRA's norms there come from weights that are packed for the device."""
    model = load_model(
        str(zoo.folders["plain r8"].parent / "model"), dtype="bfloat16", device="cpu", max_model_len=None
    )
    ids = zoo.prompt(None, 30, seed=6)
    names = ("dora r8", "bias r4", "dora everywhere", "lora after")
    size = zoo.model.config.vocab_size

    def logits(loaded: LoadedModel) -> torch.Tensor:
        runner = Runner(loaded, num_blocks=NUM_BLOCKS, num_rank_pages=8)
        found = []
        for i, name in enumerate(names):
            adapter = place(runner, loaded, zoo.folders[name], (2 * i, 2 * i + 1), i + 1)
            request = Request(ids, adapter, max_tokens=1, sampling=SamplingParams(logprobs=size))
            StepDriver(runner, NUM_BLOCKS).run([request])
            result = request.results[0].logprobs
            assert result is not None
            values = torch.empty(size)
            values[list(result.top_tokens)] = torch.tensor(result.top_logprobs)
            found.append(values - values.mean())
        return torch.stack(found)

    assert torch.nn.functional.cosine_similarity(logits(model), logits(zoo.loaded)).min() > 0.98
