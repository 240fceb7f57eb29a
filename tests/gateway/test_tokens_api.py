"""`/tokenize` and `/detokenize`: the tokens that inference makes, and back."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.accounts.calls import CallLimit
from gateway.api import counted
from tests.gateway.fake_engine import MODEL, make_tokenizer
from tests.gateway.local_stack import LocalStack

MESSAGES: list[Any] = [{"role": "user", "content": "Say 日本 🙂"}]


@pytest.fixture
def key(local_stack: LocalStack) -> str:
    return local_stack.add_tenant("acme")


def post(stack: LocalStack, key: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}{path}", json=body, headers={"Authorization": f"Bearer {key}"})


def test_tokens_are_those_that_the_engine_gets(local_stack: LocalStack, key: str) -> None:
    for body, route in (
        ({"messages": MESSAGES}, "chat/completions"),
        ({"prompt": "w1 日本🙂"}, "completions"),
    ):
        found = post(local_stack, key, "/tokenize", {"model": MODEL, **body}).json()
        answer = post(local_stack, key, f"/v1/{route}", {"model": MODEL, "max_tokens": 1, **body})
        assert answer.json()["usage"]["prompt_tokens"] == found["count"] == len(found["tokens"])
        assert local_stack.engines[0].submits[-1].prompt_tokens == found["tokens"]
        assert found["max_model_len"] > 0


def test_a_conversation_is_rendered_as_asked(local_stack: LocalStack, key: str) -> None:
    texts = []
    for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        body = {"model": MODEL, "messages": MESSAGES, **options}
        tokens = post(local_stack, key, "/tokenize", body).json()["tokens"]
        texts.append(
            post(local_stack, key, "/detokenize", {"model": MODEL, "tokens": tokens}).json()["prompt"]
        )
    assert texts == [
        "<|im_start|>user\nSay 日本 🙂<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nSay 日本 🙂<|im_end|>\n",
        "<|im_start|>user\nSay 日本 🙂",
    ]


@pytest.mark.parametrize("text", ["", "w1w2", "日本 → 🙂", "<|im_end|>x"])
def test_a_text_comes_back(local_stack: LocalStack, key: str, text: str) -> None:
    tokens = post(local_stack, key, "/tokenize", {"model": MODEL, "prompt": text}).json()["tokens"]
    assert tokens == make_tokenizer().encode(text).ids
    assert post(local_stack, key, "/detokenize", {"model": MODEL, "tokens": tokens}).json() == {
        "prompt": text
    }


def test_half_a_character_is_said_to_be_none(local_stack: LocalStack, key: str) -> None:
    tokens = make_tokenizer().encode("é").ids
    assert len(tokens) == 2
    answer = post(local_stack, key, "/detokenize", {"model": MODEL, "tokens": tokens[:1]})
    assert answer.json() == {"prompt": "\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": "x", "model": "nobody"}, 404, "model"),
        ("/tokenize", {"model": MODEL}, 400, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": 1}, 400, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "x", "messages": MESSAGES}, 400, "messages"),
        ("/tokenize", {"model": MODEL, "prompt": "w1" * 5_000_000}, 413, None),
        ("/tokenize", {"model": MODEL, "prompt": "w1" * 1_000_000}, 400, "prompt"),
        ("/detokenize", {"model": MODEL, "tokens": [1, 4000]}, 400, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"model": MODEL}, 400, "tokens"),
    ],
)
def test_what_is_wrong_is_named(
    local_stack: LocalStack, key: str, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = post(local_stack, key, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error


def test_what_makes_tokens_is_counted_by_size(
    local_stack: LocalStack, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "TOKENIZATION", CallLimit("few", "calls", 4, 60_000))
    long = {"model": MODEL, "prompt": "w1" * 5000}
    assert post(local_stack, key, "/tokenize", long).status_code == 200
    assert post(local_stack, key, "/detokenize", {"model": MODEL, "tokens": [1]}).status_code == 200
    conversation = {"model": MODEL, "messages": MESSAGES}
    for path, body in (
        ("/tokenize", {"model": MODEL, "prompt": "w1"}),
        ("/detokenize", {"model": MODEL, "tokens": [1]}),
        ("/v1/messages/count_tokens", conversation),
    ):
        refused = post(local_stack, key, path, body)
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) > 0, path
    answer = post(local_stack, key, "/v1/chat/completions", conversation | {"max_tokens": 1})
    assert answer.status_code == 200
