"""Answers that must fit, from the official client to the tokens of the real engine."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.processes import Stack
from tests.e2e.tiny import TINY, TinyZoo, upload

pytestmark = pytest.mark.e2e

QUESTION: Any = [{"role": "user", "content": "w1 w2?"}]


class Verdict(BaseModel):
    """What the client parses an answer into."""

    colour: Literal["red", "green", "blue"]
    count: int
    sure: bool


@pytest.fixture(scope="module")
def key(tiny_stack: Stack, zoo: TinyZoo) -> str:
    key = tiny_stack.create_tenant("structured")
    upload(tiny_stack, key, "tuned", zoo.add("structured", seed=3))
    return key


@pytest.mark.parametrize("model", [TINY, "tuned"])
def test_the_client_parses_every_choice(tiny_stack: Stack, key: str, model: str) -> None:
    answer = tiny_stack.client(key).chat.completions.parse(
        model=model, messages=QUESTION, response_format=Verdict, n=3, temperature=1.0, seed=5, max_tokens=200
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Verdict)


async def test_free_and_held_answers_in_one_batch_stream_what_they_give_whole(
    tiny_stack: Stack, key: str
) -> None:
    wishes: list[tuple[dict[str, Any], str]] = [
        ({"guided_choice": ["ja", "nein", "日本"]}, "ja|nein|日本"),
        ({"guided_regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"guided_grammar": 'start: "<" ("a" | "b")~3 ">"'}, "<[ab]{3}>"),
        ({}, "(?s).*"),
    ]
    async with tiny_stack.async_client(key) as client:

        async def ask(fields: dict[str, Any], seed: int, stream: bool) -> str:
            arguments: dict[str, Any] = {"model": "tuned", "messages": QUESTION, "seed": seed}
            arguments |= {"max_tokens": 40, "extra_body": fields}
            if not stream:
                answer = await client.chat.completions.create(**arguments)
                return answer.choices[0].message.content or ""
            chunks = await client.chat.completions.create(stream=True, **arguments)
            return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])

        asked = [(fields, pattern, seed) for fields, pattern in wishes for seed in range(4)]
        whole = await asyncio.gather(*(ask(fields, seed, False) for fields, _, seed in asked))
        streamed = await asyncio.gather(*(ask(fields, seed, True) for fields, _, seed in asked))
    assert streamed == whole
    for text, (_, pattern, _) in zip(whole, asked, strict=True):
        assert re.fullmatch(pattern, text), (text, pattern)


def test_a_text_completion_is_held_too(tiny_stack: Stack, key: str) -> None:
    schema = {"type": "array", "items": {"enum": [1, "two"]}, "minItems": 2, "maxItems": 3}
    answer = tiny_stack.client(key).completions.create(
        model=TINY, prompt="w1", max_tokens=64, extra_body={"guided_json": schema}
    )
    items = json.loads(answer.choices[0].text)
    assert 2 <= len(items) <= 3 and set(items) <= {1, "two"}


def test_a_schema_that_cannot_be_used_is_400_before_anything_runs(tiny_stack: Stack, key: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        tiny_stack.client(key).chat.completions.create(
            model=TINY,
            messages=QUESTION,
            response_format=schema,  # type: ignore[arg-type]
        )
    assert refused.value.param == "response_format.json_schema.schema"
    assert "Invalid type: strin" in str(refused.value)
