"""Chats of twenty turns: what was said before is not computed again, the assistant's own answers included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.block_pool import BLOCK_SIZE
from tests.e2e.processes import Stack
from tests.e2e.tiny import TINY, VOCAB_SIZE, TinyZoo, upload
from tests.gateway.fake_engine import make_tokenizer

pytestmark = pytest.mark.e2e

TURNS = 20
WORD_IDS = [make_tokenizer().token_to_id(f"w{number}") for number in range(100, 200)]
"""Tokens that a text of them is made of again, whatever stands beside them."""
ONLY_WORDS = {str(token): -100 for token in range(VOCAB_SIZE) if token not in WORD_IDS}


@pytest.fixture(scope="module")
def client(tiny_stack: Stack, zoo: TinyZoo) -> Iterator[httpx.Client]:
    key = tiny_stack.create_tenant("chatty")
    upload(tiny_stack, key, "tuned", zoo.add("chatty", seed=11))
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=tiny_stack.url, headers=headers, timeout=60) as client:
        yield client


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(client: httpx.Client, model: str, messages: list[dict[str, str]]) -> list[int]:
    return ask(client, "/tokenize", {"model": model, "messages": messages})["tokens"]


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def common(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("model", [TINY, "tuned"])
def test_twenty_turns_compute_their_own_tokens_alone(client: httpx.Client, model: str) -> None:
    """All whole blocks of earlier turns are cached. Only the last token of an answer is not: it was drawn,
    and as nothing came after it, never computed.
    """
    messages: list[dict[str, str]] = [{"role": "system", "content": f"w1w2 {model}"}]
    known: list[int] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"w{turn} and w{turn + 50}?"})
        prompt = prompt_of(client, model, messages)
        assert prompt[: len(known)] == known, "the template says again what was said"
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": 13,
            "logit_bias": ONLY_WORDS,
            "seed": turn,
        }
        answer = ask(client, "/v1/chat/completions", body)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert whole_blocks(len(known) - 1 if known else 0) <= cached < len(prompt)
        text = answer["choices"][0]["message"]["content"]
        drawn = make_tokenizer().encode(text, add_special_tokens=False).ids
        assert len(drawn) == usage["completion_tokens"] == 13
        messages.append({"role": "assistant", "content": text})
        known = prompt + drawn
    assert len(known) > TURNS * 2 * BLOCK_SIZE


def test_where_an_answer_becomes_other_tokens_all_before_it_is_cached(client: httpx.Client) -> None:
    """Random bytes, half of them no characters: the text that the client sends back is not what was drawn."""
    messages: list[dict[str, str]] = []
    before: list[int] = []
    differing = 0
    for turn in range(6):
        messages.append({"role": "user", "content": f"w{turn}? " * 5})
        prompt = prompt_of(client, "tuned", messages)
        body = {"model": "tuned", "messages": messages, "max_tokens": 20, "seed": turn, "ignore_eos": True}
        answer = ask(client, "/v1/chat/completions", body)
        assert common(before, prompt) == len(before), "the turn before, up to its answer"
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= whole_blocks(len(before))
        text = answer["choices"][0]["message"]["content"]
        differing += len(make_tokenizer().encode(text, add_special_tokens=False).ids) != 20
        messages.append({"role": "assistant", "content": text})
        before = prompt
    assert differing > 3
