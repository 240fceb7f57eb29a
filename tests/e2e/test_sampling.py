"""What is drawn through the API, against the softmax of transformers and formulas written down anew.

All seeds are fixed, so that each run draws the same.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
import torch

from kernels.reference import gumbel_noise
from tests.e2e.processes import Stack
from tests.e2e.tiny import TINY, VOCAB_SIZE, WORDS, TinyZoo, words
from tests.gateway.fake_engine import make_tokenizer

pytestmark = pytest.mark.e2e

DRAWS = 20_000
AT_ONCE = 125
PROMPT = words(9, seed=4)
ONLY_WORDS = {str(token): -100.0 for token in range(VOCAB_SIZE) if token not in WORDS}
"""With it a text tells its tokens: all that is drawn are whole words."""
TEXTS = [make_tokenizer().decode([token]) for token in range(VOCAB_SIZE)]
"""By token. Special ones and those that the tokenizer lacks are no text, half of the bytes no characters."""
BIAS = {str(WORDS[3]): 4.0, str(WORDS[50]): 3.0, str(WORDS[51]): -3.0}


@pytest.fixture(scope="module")
def client(tiny_stack: Stack) -> Iterator[httpx.Client]:
    key = tiny_stack.create_tenant("sampling")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=tiny_stack.url, headers=headers, timeout=60) as client:
        yield client


def complete(client: httpx.Client, **fields: Any) -> str:
    """An answer of words."""
    body = {"model": TINY, "prompt": PROMPT, "ignore_eos": True, "logit_bias": ONLY_WORDS, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def logits_after(zoo: TinyZoo, tokens: Sequence[int]) -> torch.Tensor:
    """float64 [VOCAB_SIZE], by transformers."""
    with torch.no_grad():
        return zoo.model(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1].double()


# ---- one token, very often ------------------------------------------------------------------------------


def expected(zoo: TinyZoo, fields: dict[str, Any], *, nucleus_off_by: int = 0) -> torch.Tensor:
    """The distribution that fields ask for, by their definitions. Tokens are few enough not to tie."""
    logits = logits_after(zoo, PROMPT)
    for token, bias in fields.get("logit_bias", {}).items():
        logits[int(token)] += bias
    probabilities = (logits / fields.get("temperature", 1.0)).softmax(0)
    order = probabilities.argsort(descending=True).tolist()
    kept = [t for t in order if probabilities[t] >= fields.get("min_p", 0.0) * probabilities[order[0]]]
    kept = kept[: fields.get("top_k") or None]
    shares = probabilities[kept] / probabilities[kept].sum()
    before = shares.cumsum(0) - shares  # the mass of those more likely
    size = int((before < fields.get("top_p", 1.0)).sum()) + nucleus_off_by
    found = torch.zeros_like(probabilities)
    found[kept[:size]] = probabilities[kept[:size]]
    return found / found.sum()


def is_likely(counts: Counter[str], distribution: torch.Tensor) -> bool:
    """Chi-square at a significance of about 1e-4; tokens expected less than five times count as one."""
    want: Counter[str] = Counter()
    for text, share in zip(TEXTS, distribution.tolist(), strict=True):
        want[text] += share * DRAWS  # type: ignore[assignment]
    if any(not want[text] for text in counts):
        return False
    groups = [(counts[text], wanted) for text, wanted in want.items() if wanted >= 5]
    rare = [(counts[text], wanted) for text, wanted in want.items() if wanted < 5]
    if sum(wanted for _, wanted in rare) > 1:
        groups.append((sum(count for count, _ in rare), sum(wanted for _, wanted in rare)))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in groups)
    freedom = max(1, len(groups) - 1)
    # Wilson and Hilferty's approximation of the chi-square quantile.
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


async def draw(client: httpx.AsyncClient, fields: dict[str, Any]) -> Counter[str]:
    """How often each text was drawn as the first after the prompt."""
    body = {"model": TINY, "prompt": PROMPT, "ignore_eos": True, "max_tokens": 1, "n": AT_ONCE, **fields}
    counts: Counter[str] = Counter()
    for first in range(0, DRAWS // AT_ONCE, 4):
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body | {"seed": seed}) for seed in range(first, first + 4))
        )
        for answer in answers:
            counts.update(choice["text"] for choice in answer.json()["choices"])
    return counts


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.3},
        {"temperature": 1.0, "top_k": 12},
        {"temperature": 0.8, "top_p": 0.5},
        {"temperature": 0.8, "min_p": 0.1},
        {"temperature": 1.0, "logit_bias": BIAS},
    ],
    ids=str,
)
async def test_draws_are_distributed_as_the_softmax(
    zoo: TinyZoo, client: httpx.Client, fields: dict[str, Any]
) -> None:
    async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=60) as many:
        counts = await draw(many, fields)
    assert counts.total() == DRAWS
    distribution = expected(zoo, fields)
    assert (distribution > 0).sum() > 4, "there is something to choose from"
    assert is_likely(counts, distribution)
    # And the test would notice.
    if "top_p" in fields:
        assert not is_likely(counts, expected(zoo, fields, nucleus_off_by=-1))
        assert not is_likely(counts, expected(zoo, fields, nucleus_off_by=1))
    warmer = fields | {"temperature": 1.25 * fields["temperature"]}
    assert not is_likely(counts, expected(zoo, warmer))


# ---- whole answers --------------------------------------------------------------------------------------


def reference_answer(zoo: TinyZoo, fields: dict[str, Any], count: int) -> list[int]:
    """What is generated with penalties: OpenAI's for what the answer has so far, and the repetition's for the
    prompt as well. Noise is that of the seed and the position.
    """
    tokens: list[int] = []
    for position in range(len(PROMPT), len(PROMPT) + count):
        logits = logits_after(zoo, [*PROMPT, *tokens])
        for token, bias in ONLY_WORDS.items():
            logits[int(token)] += bias
        for token in {*PROMPT, *tokens}:
            factor = fields.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(tokens):
            logits[token] -= fields.get("frequency_penalty", 0.0) * tokens.count(token)
            logits[token] -= fields.get("presence_penalty", 0.0)
        if temperature := fields["temperature"]:
            seed, place = torch.tensor([fields["seed"]]), torch.tensor([position])
            logits = logits / temperature + gumbel_noise(seed, place, VOCAB_SIZE)[0]
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "seed": 5},
        {"temperature": 0.7, "repetition_penalty": 1.6, "frequency_penalty": -0.6, "seed": 6},
        {"temperature": 0.0, "presence_penalty": -2.0, "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_penalties_follow_their_formulas_over_a_whole_answer(
    zoo: TinyZoo, client: httpx.Client, fields: dict[str, Any]
) -> None:
    count = 24
    text = complete(client, max_tokens=count, **fields)
    want = reference_answer(zoo, fields, count)
    assert text == make_tokenizer().decode(want)
    plain = {name: fields[name] for name in ("temperature", "seed") if name in fields}
    assert text != complete(client, max_tokens=count, **plain), "they make a difference"


async def test_a_seed_gives_the_same_answer_alone_and_in_a_batch_of_32(client: httpx.Client) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.5},
        {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    ]
    asked = [
        {
            "seed": 100 + number,
            "max_tokens": 30,
            "prompt": words(5 + number % 7, seed=number),
            **kinds[number % 4],
        }
        for number in range(32)
    ]
    alone = [complete(client, **fields) for fields in asked]
    async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=60) as together:
        answers = await asyncio.gather(
            *(
                together.post(
                    "/v1/completions",
                    json={"model": TINY, "ignore_eos": True, "logit_bias": ONLY_WORDS, **fields},
                )
                for fields in asked
            )
        )
    assert [answer.json()["choices"][0]["text"] for answer in answers] == alone
    assert len(set(alone)) == 32
