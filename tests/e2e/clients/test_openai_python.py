"""The official Python client: what it streams is what it gets whole, and it parses what was asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from pydantic import BaseModel

from tests.e2e.clients.conftest import CALLING, PLAIN, Account, approximately
from tests.e2e.processes import START_S
from tests.e2e.tiny import TINY, words

pytestmark = pytest.mark.e2e

QUESTION: Any = [{"role": "system", "content": "w3 🙂"}, {"role": "user", "content": "w1 日本 w2?"}]
SMILE, JAPAN = 459, 460
"""Tokens of several bytes each; the tokens below 256 are single bytes, most of them no characters alone."""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 4}, "day": {"enum": ["→", "日本", "🙂"]}},
            "required": ["place", "day"],
            "additionalProperties": False,
        },
    },
}
CHATS: dict[str, dict[str, Any]] = {
    "choices with logprobs": {"n": 3, "logprobs": True, "top_logprobs": 4, "temperature": 1.2},
    "bytes that make no characters": {"temperature": 2.0, "logit_bias": {t: 20 for t in range(120, 256)}},
    "characters of several bytes": {"logit_bias": {SMILE: 40, JAPAN: 40}, "logprobs": True, "n": 2},
    "a stop across tokens": {"stop": ["🙂日", "w5"], "logit_bias": {SMILE: 40, JAPAN: 40}, "n": 4},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.7, "top_p": 0.8},
    "a form": {"extra_body": {"guided_choice": ["日本→🙂", "🙂🙂🙂", "w1"]}, "n": 2},
    "greedy": {"temperature": 0, "max_tokens": 3},
}
TEXTS: dict[str, dict[str, Any]] = {
    "prompts with logprobs": {"prompt": ["w1 w2", "🙂"], "n": 2, "logprobs": 3},
    "token ids": {"prompt": [words(20, 1), words(33, 2)], "temperature": 1.3},
    "a stop": {"prompt": "w7", "stop": "🙂", "logit_bias": {SMILE: 35}, "n": 3},
}


@dataclass
class Heard:
    """One choice, put together from the chunks of a stream."""

    finish_reason: str | None = None
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    logprobs: list[Any] | None = None

    def take(self, choice: ChunkChoice) -> None:
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.index == len(self.calls):
                assert call.id and call.type == "function" and call.function.name
                self.calls.append((call.function.name, ""))
            name, written = self.calls[call.index]
            self.calls[call.index] = name, written + (call.function.arguments or "")
        if choice.logprobs is not None and choice.logprobs.content is not None:
            self.logprobs = (self.logprobs or []) + [each.model_dump() for each in choice.logprobs.content]


def heard(chunks: Iterable[ChatCompletionChunk], count: int) -> tuple[list[Heard], ChatCompletionChunk]:
    """The choices of a stream, and its last chunk, which has the usage and no choice."""
    choices, last = [Heard() for _ in range(count)], None
    for last in chunks:
        for choice in last.choices:
            assert choices[choice.index].finish_reason is None, "nothing comes after the end"
            choices[choice.index].take(choice)
    assert last is not None and not last.choices
    return choices, last


def told(completion: ChatCompletion) -> list[Heard]:
    """The choices of a whole answer. Logprobs are equal to within their rounding."""
    found = []
    for choice in sorted(completion.choices, key=lambda choice: choice.index):
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]  # type: ignore[union-attr]
        logprobs = choice.logprobs.model_dump()["content"] if choice.logprobs is not None else None
        content = choice.message.content or ""
        found.append(Heard(choice.finish_reason, content, calls, approximately(logprobs)))
    return found


def usage_of(answer: ChatCompletion | ChatCompletionChunk | Completion) -> tuple[int, int, int]:
    assert answer.usage is not None
    usage = answer.usage
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("model", [TINY, PLAIN])
def test_a_streamed_chat_says_all_that_the_whole_one_does(client: OpenAI, model: str, name: str) -> None:
    arguments: Any = {"model": model, "messages": QUESTION, "seed": 11, "max_tokens": 24} | CHATS[name]
    whole = client.chat.completions.create(**arguments)
    chunks = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    streamed, last = heard(chunks, arguments.get("n", 1))
    assert streamed == told(whole)
    assert usage_of(last) == usage_of(whole)
    assert whole.model.partition("@")[0] == last.model.partition("@")[0] == model
    for choice in whole.choices:
        stops = arguments.get("stop", ())
        assert not any(stop in (choice.message.content or "") for stop in stops)
        if arguments.get("logprobs"):
            assert choice.logprobs is not None and choice.logprobs.content is not None
            written = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
            assert written.decode(errors="replace") == choice.message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_streamed_calls_are_those_of_the_whole_answer(client: OpenAI, choice: Any) -> None:
    arguments: Any = {"model": CALLING, "messages": QUESTION, "tools": [WEATHER], "tool_choice": choice}
    arguments |= {"seed": 3, "n": 3, "max_tokens": 200, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**arguments)
    with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    assert told(streamed) == told(whole)
    assert usage_of(streamed) == usage_of(whole)
    chunks = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    assert heard(chunks, 3)[0] == told(whole)
    for found in whole.choices:
        assert found.finish_reason == "tool_calls"
        [call] = list(found.message.tool_calls or ())
        assert json.loads(call.function.arguments)["day"] in ("→", "日本", "🙂")  # type: ignore[union-attr]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("model", [TINY, PLAIN])
def test_a_streamed_text_says_all_that_the_whole_one_does(client: OpenAI, model: str, name: str) -> None:
    arguments: Any = {"model": model, "seed": 11, "max_tokens": 16} | TEXTS[name]
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **arguments))
    assert chunks[-1].usage is not None and not chunks[-1].choices
    assert usage_of(chunks[-1]) == usage_of(whole)
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        if choice.logprobs is not None:
            for kind in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                pieces = [item for part in parts for item in getattr(part.logprobs, kind, None) or ()]
                assert pieces == approximately(getattr(choice.logprobs, kind)), kind


class Verdict(BaseModel):
    """What an answer is parsed into."""

    colour: Literal["red", "日本", "🙂"]
    count: int


async def test_thirty_two_asynchronous_answers_are_those_of_the_synchronous_client(
    client: OpenAI, account: Account
) -> None:
    def arguments(seed: int) -> Any:
        model = (TINY, PLAIN)[seed % 2]
        return {"model": model, "messages": QUESTION, "seed": seed, "max_tokens": 12}

    alone = [client.chat.completions.create(**arguments(seed)) for seed in range(0, 32, 5)]
    async with AsyncOpenAI(
        base_url=account.base_url, api_key=account.key, max_retries=0, timeout=START_S
    ) as other:
        answers = await asyncio.gather(*(other.chat.completions.create(**arguments(s)) for s in range(32)))
        parsed = await other.chat.completions.parse(
            **arguments(1) | {"max_tokens": 200}, response_format=Verdict
        )
    assert [told(answer) for answer in answers[::5]] == [told(answer) for answer in alone]
    assert isinstance(parsed.choices[0].message.parsed, Verdict)


def test_the_raw_response_shows_the_limits_and_the_request_s_id(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=TINY, messages=QUESTION, max_tokens=2)
    assert raw.http_response.status_code == 200
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].finish_reason == "length"
    with client.chat.completions.with_streaming_response.create(
        model=TINY, messages=QUESTION, max_tokens=2, stream=True
    ) as response:
        lines = list(response.iter_lines())
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"


def test_each_refusal_is_the_client_s_own_exception(client: OpenAI) -> None:
    chat = client.chat.completions
    with pytest.raises(openai.NotFoundError) as missing:
        chat.create(model="nobody-s", messages=QUESTION)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        chat.create(model=TINY, messages=QUESTION, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError) as unknown:
        client.with_options(api_key="sk-none").models.list()
    assert unknown.value.code == "invalid_api_key" and "sk-none" not in str(unknown.value)


def test_models_are_listed_and_found_by_name(client: OpenAI) -> None:
    listed = {model.id for model in client.models.list()}
    assert {TINY, PLAIN, CALLING} <= listed
    assert client.models.retrieve(PLAIN).id == PLAIN
