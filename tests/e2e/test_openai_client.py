"""What users of the official client rely on, asked of the real stack."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import Tenants
from tests.e2e.processes import BASE, Stack

pytestmark = pytest.mark.e2e

SAMPLED: dict[str, Any] = {"seed": 7, "temperature": 0.9, "max_tokens": 20}
QUESTION: Any = [{"role": "user", "content": "Tell me a story about a small boat."}]


@pytest.fixture(scope="module")
def acme(stack: Stack, tenants: Tenants) -> OpenAI:
    return stack.client(tenants.acme)


@pytest.mark.parametrize("model", [BASE, "pirate"])
def test_a_streamed_answer_is_the_whole_one_and_its_usage_adds_up(acme: OpenAI, model: str) -> None:
    whole = acme.chat.completions.create(model=model, messages=QUESTION, n=3, **SAMPLED)
    stream = acme.chat.completions.create(
        model=model, messages=QUESTION, n=3, stream=True, stream_options={"include_usage": True}, **SAMPLED
    )
    texts, reasons, usages = ["", "", ""], [""] * 3, []
    for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) == 3, "each of the n choices has noise of its own"
    (usage,) = usages
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    if reasons == ["length"] * 3:
        assert usage.completion_tokens == 3 * SAMPLED["max_tokens"]


def test_another_seed_gives_another_answer(acme: OpenAI) -> None:
    answers = [
        acme.chat.completions.create(model=BASE, messages=QUESTION, **{**SAMPLED, "seed": seed})
        for seed in (7, 8)
    ]
    assert answers[0].choices[0].message.content != answers[1].choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(acme: OpenAI, stream: bool) -> None:
    arguments: dict[str, Any] = {"model": BASE, "prompt": "One, two, three, four, five,", "temperature": 0}
    free = acme.completions.create(max_tokens=20, **arguments).choices[0].text
    stop = free[len(free) // 2 :][:4]  # lies across tokens
    arguments |= {"max_tokens": 20, "stop": stop}
    if stream:
        chunks = acme.completions.create(stream=True, **arguments)
        choices = [choice for chunk in chunks for choice in chunk.choices]
    else:
        choices = acme.completions.create(**arguments).choices
    assert "".join(choice.text for choice in choices) == free[: free.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_a_prompt_too_long_is_refused_with_both_numbers(acme: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        acme.completions.create(model="pirate", prompt=[5] * 1024, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 1024 tokens" in str(caught.value)
    assert "your prompt has 1024 tokens" in str(caught.value)
    longest = acme.completions.create(model="pirate", prompt=[5] * 1023, max_tokens=1)
    assert longest.usage is not None and longest.usage.prompt_tokens == 1023


def test_models_lists_the_base_and_the_tenants_own_adapters(stack: Stack, tenants: Tenants) -> None:
    assert [model.id for model in stack.client(tenants.acme).models.list()] == [BASE, "pirate", "sql", "wide"]
    assert [model.id for model in stack.client(tenants.globex).models.list()] == [BASE, "sql"]
