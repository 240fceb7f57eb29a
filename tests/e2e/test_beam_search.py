"""Beam search through the API, against transformers' own: the same answers in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.processes import Stack
from tests.e2e.tiny import TINY, TinyZoo, upload, words
from tests.gateway.fake_engine import EOS, make_tokenizer

pytestmark = pytest.mark.e2e

PROMPTS = [words(12, seed=8), words(40, seed=9)]


@pytest.fixture(scope="module")
def client(tiny_stack: Stack, zoo: TinyZoo) -> Iterator[httpx.Client]:
    key = tiny_stack.create_tenant("beams")
    upload(tiny_stack, key, "tuned", zoo.add("beams", seed=21))
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=tiny_stack.url, headers=headers, timeout=60) as client:
        yield client


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"use_beam_search": True, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@torch.no_grad()
def generated(
    zoo: TinyZoo, model: str, prompt: list[int], *, width: int, count: int, ends: list[int], **options: Any
) -> list[list[int]]:
    """What transformers finds, the best first; without what fills the ends up."""
    assert zoo.peft is not None
    ids = torch.tensor([prompt])
    with zoo._with(None if model == TINY else "beams"):
        found = zoo.peft.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=0,
            **options,
        )
    answers = []
    for row in found[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), count)
        answers.append(row[:end])
    return answers


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (TINY, {}),
        (TINY, {"length_penalty": 0.0, "early_stopping": "never"}),
        (TINY, {"length_penalty": -1.0, "early_stopping": True}),
        ("tuned", {}),
    ],
    ids=str,
)
def test_the_answers_are_transformers_own(
    client: httpx.Client, zoo: TinyZoo, model: str, options: dict[str, Any]
) -> None:
    """The end tokens are such as come up in the searches."""
    width, count, lengths = 3, 8, set()
    free = [generated(zoo, model, prompt, width=width, count=count, ends=[]) for prompt in PROMPTS]
    stops = [free[0][0][4], free[1][1][6]]
    ends = [EOS, *stops]
    answer = complete(
        client,
        model=model,
        prompt=PROMPTS,
        n=width,
        max_tokens=count,
        logprobs=0,
        stop_token_ids=stops,
        **options,
    )
    decode = make_tokenizer().decode
    for number, prompt in enumerate(PROMPTS):
        want = generated(zoo, model, prompt, width=width, count=count, ends=ends, **options)
        for tokens, choice in zip(want, answer["choices"][number * width :], strict=False):
            is_end = tokens[-1] in ends
            shown = tokens[:-1] if is_end else tokens
            assert choice["text"] == decode(shown)
            assert len(choice["logprobs"]["tokens"]) == len(shown)
            assert choice["finish_reason"] == ("stop" if is_end else "length")
            lengths.add(len(tokens))
    assert answer["usage"]["completion_tokens"] >= len(PROMPTS) * width
    if options.get("length_penalty") == -1.0:
        assert min(lengths) < count, "short ones are preferred, so that an end token comes in"


def test_the_best_of_more_beams_and_without_ends(client: httpx.Client, zoo: TinyZoo) -> None:
    fields = {"model": TINY, "prompt": PROMPTS[0], "max_tokens": 10, "ignore_eos": True, "echo": True}
    (choice,) = complete(client, n=1, best_of=6, **fields)["choices"]
    best, *_ = generated(zoo, TINY, PROMPTS[0], width=6, count=10, ends=[])
    decode = make_tokenizer().decode
    assert choice["text"] == decode(PROMPTS[0]) + decode(best)
    (again,) = complete(client, n=1, **fields)["choices"]
    greedy = client.post("/v1/completions", json={**fields, "temperature": 0}).json()["choices"][0]
    assert again["text"] == greedy["text"], "one beam is greedy"


def test_the_beams_of_a_prompt_find_its_blocks_cached(client: httpx.Client) -> None:
    before = sum_of_cached(client)
    complete(client, model=TINY, prompt=words(160, seed=77), n=4, max_tokens=8)
    assert sum_of_cached(client) == before, "of the prompt nothing was cached, and only that is told"


def sum_of_cached(client: httpx.Client) -> int:
    return client.get("/v1/usage").json()["total"]["cached_tokens"]
