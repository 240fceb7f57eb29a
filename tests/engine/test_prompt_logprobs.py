"""What is told of prompts, against transformers and peft: in chunks, past the prefix cache, once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine import prompt_logprobs
from engine.block_pool import root_hash
from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.sequence import FinishReason, Request
from engine.step import SamplingParams
from tests.engine.sampled_serving import Served, serve_requests
from tests.model_zoo import save_adapter, save_tiny_model
from tests.oracles import PeftOracle

NUM_PAGES = 4
Zoo = tuple[LoadedModel, PeftOracle, dict[bytes, Path]]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A tiny model, an adapter of its layers, and one that changes its lm_head too."""
    folder = tmp_path_factory.mktemp("zoo")
    source = save_tiny_model(folder / "model", tie_word_embeddings=False)
    names = {"layers": ("q_proj", "up_proj"), "head": ("v_proj", "lm_head")}
    folders = {
        name: save_adapter(source, folder / name, rank=8, targets=targets, seed=seed)
        for seed, (name, targets) in enumerate(names.items())
    }
    model = load_model(str(folder / "model"), dtype="float32", device="cpu", max_model_len=None)
    return model, PeftOracle(source, folders), {name.encode(): path for name, path in folders.items()}


def make_request(
    model: LoadedModel,
    number: int,
    prompt: list[int],
    adapter: str | None,
    *,
    num_top: int | None,
    n: int = 1,
) -> Request:
    digest = (adapter or "").encode()
    return Request(
        link="link",
        request_id=number,
        prompt=prompt,
        sampling=tuple(SamplingParams(temperature=1.0, seed=seed) for seed in range(n)),
        max_len=len(prompt) + 6,
        block_root=root_hash(model.digest, "float32", digest, b"scope"),
        adapter_digest=digest,
        prompt_logprobs=num_top,
    )


def run(
    zoo: Zoo, requests: list[Request], *, num_blocks: int = 120, overlap: bool = False, at_once: int = 2
) -> Served:
    model, _, folders = zoo
    return serve_requests(
        model,
        Runner(model, num_blocks=num_blocks, num_rank_pages=NUM_PAGES),
        requests,
        num_blocks=num_blocks,
        overlap=overlap,
        folders=folders,
        num_pages=NUM_PAGES,
        at_once=at_once,
    )


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 320) for _ in range(length)]


def assert_told(zoo: Zoo, served: Served, request: Request) -> None:
    """Everything that is told of a request's prompt is what peft says."""
    told = served.prompts.get(request.request_id, [])
    if request.prompt_logprobs is None:
        assert not told
        return
    want = zoo[1].logprobs(request.adapter_digest.decode() or None, request.prompt)
    assert len(told) == len(request.prompt) - 1
    for entry, token, row in zip(told, request.prompt[1:], want, strict=True):
        assert entry.chosen == pytest.approx(row[token].item(), abs=2e-3)
        top = row.topk(request.prompt_logprobs)
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=2e-3)
        assert len(set(entry.top_tokens)) == request.prompt_logprobs
        for found, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True):
            assert logprob == pytest.approx(row[found].item(), abs=2e-3)
        assert token not in entry.top_tokens or entry.chosen in entry.top_logprobs, "bit for bit the same"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [120, 13])
def test_prompts_are_scored_as_peft_does(zoo: Zoo, overlap: bool, num_blocks: int) -> None:
    """Chunks of up to 48 tokens, beside decodes and others' adapters; with few blocks some are preempted."""
    model, rng = zoo[0], random.Random(1)
    shared = random_prompt(rng, 40)
    requests = []
    for number in range(12):
        adapter = (None, "layers", "head")[number % 3]
        prompt = shared[: rng.choice((0, 33, 40))] + random_prompt(rng, rng.choice((1, 2, 16, 17, 60)))
        num_top = (0, 3, None, 5)[number % 4]
        requests.append(make_request(model, number, prompt, adapter, num_top=num_top, n=rng.choice((1, 3))))
    served = run(zoo, requests, num_blocks=num_blocks, overlap=overlap)
    assert (served.num_preemptions > 0) == (num_blocks == 13)
    for request in requests:
        assert_told(zoo, served, request)
        for choice in range(len(request.sampling)):
            assert len(served.tokens[request.request_id, choice]) == 6
    plain = run(zoo, [make_request(model, 0, requests[0].prompt, None, num_top=None)])
    assert served.tokens[0, 0] == plain.tokens[0, 0], "to be scored changes nothing"


def test_what_the_prefix_cache_has_is_computed_again_for_its_logprobs(zoo: Zoo) -> None:
    prompt = random_prompt(random.Random(2), 70)
    wishes = (None, 2, None)
    requests = [make_request(zoo[0], i, prompt, "layers", num_top=num) for i, num in enumerate(wishes)]
    served = run(zoo, requests, at_once=1)  # each comes a step after the one before
    assert_told(zoo, served, requests[1])
    assert served.cached[2] > served.cached[1] == 0


def test_few_logits_are_held_at_once(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a step: its prompt is scored a few tokens at a time, and comes out the same."""
    sizes: list[int] = []
    score = prompt_logprobs._score

    def noting(logits: torch.Tensor, *more: object) -> tuple[torch.Tensor, ...]:
        sizes.append(logits.shape[0])
        return score(logits, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(prompt_logprobs, "_MOST_LOGITS", 7 * zoo[0].config.vocab_size)
    monkeypatch.setattr(prompt_logprobs, "_score", noting)
    request = make_request(zoo[0], 0, random_prompt(random.Random(3), 41), "head", num_top=1)
    assert_told(zoo, run(zoo, [request]), request)
    assert sizes == [7] * 5 + [5]


def test_only_the_prompt_is_computed_where_nothing_else_is_wanted(zoo: Zoo) -> None:
    requests = [
        make_request(zoo[0], i, random_prompt(random.Random(i), length), None, num_top=num_top, n=n)
        for i, (length, num_top, n) in enumerate(((50, 1, 1), (1, 1, 1), (20, None, 3)))
    ]
    for request in requests:
        request.prompt_only, request.max_len = True, len(request.prompt) + 1
    for overlap in (False, True):
        served = run(zoo, requests, overlap=overlap)
        assert not served.tokens
        assert set(served.ends.values()) == {FinishReason.LENGTH} and len(served.ends) == 5
        for request in requests[:2]:
            assert_told(zoo, served, request)
