"""Anthropic's Python client: what it streams is what it gets whole, its tools and its errors are its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import OpenAI
from pydantic import BaseModel

from tests.e2e.clients.conftest import CALLING, PLAIN, Account
from tests.e2e.processes import START_S
from tests.e2e.tiny import TINY

pytestmark = pytest.mark.e2e

QUESTION: Any = [{"role": "user", "content": "w1 日本 w2? 🙂"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 4}, "day": {"enum": ["→", "日本", "🙂"]}},
        "required": ["place", "day"],
        "additionalProperties": False,
    },
}
MODELS = [TINY, PLAIN]


@pytest.fixture(scope="module")
def messages(account: Account) -> Iterator[Anthropic]:
    url = account.base_url.removesuffix("/v1")
    with Anthropic(base_url=url, api_key=account.key, max_retries=0, timeout=START_S) as client:
        yield client


def said(message: anthropic.types.Message) -> Any:
    """A message but for ids, what the client adds, and how much of the prompt was cached by then."""
    found = message.model_dump(exclude={"id": True, "usage": {"input_tokens", "cache_read_input_tokens"}})
    for block in found["content"]:
        block.pop("parsed_output", None)
        block.pop("id", None)
    usage = message.usage
    return found | {"prompt": usage.input_tokens + (usage.cache_read_input_tokens or 0)}


def both_ways(client: Anthropic, **arguments: Any) -> anthropic.types.Message:
    """Asks streamed and not, and returns the one answer."""
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        streamed = stream.get_final_message()
    assert said(streamed) == said(whole)
    return whole


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"extra_body": {"seed": 7}},
        {"extra_body": {"temperature": 0}},
        {"extra_body": {"seed": 9, "top_k": 40, "top_p": 0.9}, "stop_sequences": ["w1", "🙂", "日"]},
    ],
)
def test_a_streamed_message_is_the_whole_one(
    messages: Anthropic, client: OpenAI, model: str, arguments: dict[str, Any]
) -> None:
    message = both_ways(messages, model=model, messages=QUESTION, max_tokens=60, **arguments)
    assert message.model == (TINY if model == TINY else f"{PLAIN}@1")
    chat = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=60,
        extra_body=arguments["extra_body"],
        stop=arguments.get("stop_sequences"),
    )
    text = "".join(block.text for block in message.content if block.type == "text")
    assert text == chat.choices[0].message.content, "a message is a chat by another name"
    assert chat.usage is not None and message.usage.output_tokens == chat.usage.completion_tokens
    assert message.stop_sequence in (None, *arguments.get("stop_sequences", ()))


async def test_many_at_once(messages: Anthropic, account: Account) -> None:
    url = account.base_url.removesuffix("/v1")
    asked: list[dict[str, Any]] = [
        {"model": model, "messages": QUESTION, "max_tokens": 30, "extra_body": {"seed": seed}}
        for model in MODELS
        for seed in range(6)
    ]
    async with AsyncAnthropic(base_url=url, api_key=account.key, max_retries=0, timeout=START_S) as own:

        async def streamed(arguments: Any) -> anthropic.types.Message:
            async with own.messages.stream(**arguments) as stream:
                return await stream.get_final_message()

        together = await asyncio.gather(*map(streamed, asked))
    alone = [messages.messages.create(**arguments) for arguments in asked]
    assert [said(message) for message in together] == [said(message) for message in alone]


def test_usage_is_what_counting_says_and_the_second_time_cached(messages: Anthropic) -> None:
    prompt: Any = {"model": PLAIN, "system": "w5 " * 60, "messages": QUESTION}
    counted = messages.messages.count_tokens(**prompt).input_tokens
    first, again = (messages.messages.create(**prompt, max_tokens=2).usage for _ in range(2))
    for usage in (first, again):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    assert again.cache_read_input_tokens and again.cache_read_input_tokens >= counted - 16


def test_a_round_trip_with_tools(messages: Anthropic) -> None:
    arguments: Any = {"model": CALLING, "tools": [WEATHER], "max_tokens": 200, "extra_body": {"seed": 5}}
    held = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    message = both_ways(messages, messages=QUESTION, **arguments, **held)
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "weather"
    assert call.input.keys() == {"place", "day"} and call.input["day"] in ("→", "日本", "🙂")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "w7"}
    turns: Any = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    after = both_ways(messages, messages=turns, **arguments)
    assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) > len(str(call.input))
    for block in after.content:
        assert block.type != "tool_use" or isinstance(block.input, dict)
    with pytest.raises(anthropic.BadRequestError, match="does not show tools"):
        messages.messages.create(model=TINY, messages=QUESTION, max_tokens=2, tools=[WEATHER])


class Place(BaseModel):
    """What an answer is parsed as."""

    name: Literal["日本", "🙂"]
    warm: bool


def test_an_answer_is_parsed(messages: Anthropic) -> None:
    found = messages.messages.parse(model=PLAIN, messages=QUESTION, max_tokens=200, output_format=Place)
    assert isinstance(found.parsed_output, Place)


def test_errors_are_the_client_s_own(messages: Anthropic, account: Account) -> None:
    arguments: Any = {"messages": QUESTION, "max_tokens": 2}
    with pytest.raises(anthropic.NotFoundError):
        messages.messages.create(model="nothing", **arguments)
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 2304") as caught:
        messages.messages.create(model=PLAIN, **arguments | {"max_tokens": 2304})
    assert caught.value.request_id and caught.value.request_id.startswith("req_")
    nobody = messages.with_options(api_key="lpx_nobody_nothing")
    with pytest.raises(anthropic.AuthenticationError):
        nobody.messages.create(model=PLAIN, **arguments)
    raw = messages.messages.with_raw_response.create(model=PLAIN, **arguments)
    assert raw.headers["request-id"] == raw.parse()._request_id
