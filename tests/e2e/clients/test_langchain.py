"""LangChain's ChatOpenAI over a running stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, SecretStr

from tests.e2e.clients.conftest import CALLING, PLAIN, Account
from tests.e2e.tiny import TINY

pytestmark = pytest.mark.e2e

MESSAGES = [SystemMessage("w3"), HumanMessage("w1 日本?")]
Models = Callable[..., ChatOpenAI]


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")  # random weights would write further fields without end

    place: Literal["w1", "日本"]
    day: Literal["today", "🙂"]


@pytest.fixture(scope="module")
def chat(account: Account) -> Models:
    def make(model: str, **options: Any) -> ChatOpenAI:
        options = {"temperature": 0.9, "seed": 5, "max_tokens": 12, "max_retries": 0} | options
        return ChatOpenAI(
            model=model, base_url=account.base_url, api_key=SecretStr(account.key), timeout=60, **options
        )

    return make


async def test_invoke_stream_and_batch_give_one_answer(chat: Models) -> None:
    for model in (TINY, PLAIN):  # in one loop: the package keeps its connections from one loop to the next
        await compare_ways(chat(model, stream_usage=True))


async def compare_ways(asked: ChatOpenAI) -> None:
    whole = asked.invoke(MESSAGES)
    assert isinstance(whole, AIMessage) and whole.usage_metadata is not None
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 12
    total = AIMessageChunk(content="")
    for chunk in asked.stream(MESSAGES):
        assert isinstance(chunk, AIMessageChunk)
        total = total + chunk
    assert total.content == whole.content
    assert total.usage_metadata is not None
    assert total.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert "".join([str(chunk.content) async for chunk in asked.astream(MESSAGES)]) == whole.content
    assert [answer.content for answer in await asked.abatch([MESSAGES] * 3)] == [whole.content] * 3


def test_logprobs_and_stop_reach_the_engine(chat: Models) -> None:
    free = chat(TINY, logprobs=True, top_logprobs=2).invoke(MESSAGES)
    entries = free.response_metadata["logprobs"]["content"]
    assert len(entries) == 12 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    text = str(free.content)
    stopped = chat(TINY).invoke(MESSAGES, stop=[text[3:5]])
    assert stopped.content == text[: text.index(text[3:5])]


@pytest.mark.parametrize(
    ("model", "method"), [(TINY, "json_schema"), (PLAIN, "json_schema"), (CALLING, "function_calling")]
)
def test_structured_output_is_parsed(chat: Models, model: str, method: Any) -> None:
    structured = chat(model, max_tokens=200).with_structured_output(Weather, method=method)
    assert isinstance(structured.invoke(MESSAGES), Weather)


def test_a_call_and_its_result_go_round(chat: Models) -> None:
    asked = chat(CALLING, max_tokens=200).bind_tools(
        [Weather], tool_choice="required", parallel_tool_calls=False
    )
    answer = asked.invoke(MESSAGES)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "Weather" and Weather(**call["args"])
    total = AIMessageChunk(content="")
    for chunk in asked.stream(MESSAGES):
        assert isinstance(chunk, AIMessageChunk)
        total = total + chunk
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [(call["name"], call["args"])]
    turns = [*MESSAGES, answer, ToolMessage("rain", tool_call_id=str(call["id"]))]
    assert isinstance(chat(CALLING).bind_tools([Weather]).invoke(turns), AIMessage)


def test_text_completions(account: Account) -> None:
    model = OpenAI(
        model=PLAIN,
        base_url=account.base_url,
        api_key=SecretStr(account.key),
        temperature=0,
        max_tokens=8,
    )
    whole = model.invoke("w1 w2")
    assert whole and "".join(model.stream("w1 w2")) == whole
