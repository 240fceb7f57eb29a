"""What OpenAI's client gets of models that think: streamed or not, with tools, stops, logprobs and usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher
from openai import OpenAI

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.local_stack import LocalStack
from tests.gateway.messages.conftest import TOKENIZER, prompt_of, script

Engines = dict[str, FakeEngine]
QUESTION: Any = [{"role": "user", "content": "What is <think>?"}]
THOUGHT, SAID = "Hm, 🙂 STOP <b>\n\nwell", "It is\na tag. 🙂"
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "日本"}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def openai_client(messages_stack: LocalStack) -> Iterator[OpenAI]:
    with messages_stack.client(messages_stack.add_tenant("openai")) as client:
        yield client


def streamed(client: OpenAI, **arguments: Any) -> list[dict[str, Any]]:
    """The choices of a streamed answer, put together."""
    found: dict[int, dict[str, Any]] = {}
    usage = None
    stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            into = found.setdefault(choice.index, {"content": "", "reasoning_content": "", "calls": ""})
            delta = choice.delta.model_dump(exclude_unset=True)
            if "reasoning_content" in delta:
                assert delta["reasoning_content"] == delta["reasoning"], "two names of one thing"
                assert not into["content"], "the thought comes first"
                into["reasoning_content"] += delta["reasoning_content"]
            into["content"] += delta.get("content") or ""
            into["calls"] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            into["reason"] = choice.finish_reason
            into.setdefault("logprobs", []).extend(choice.logprobs.content or () if choice.logprobs else ())
    return [{**found[index], "usage": usage} for index in sorted(found)]


def whole(client: OpenAI, **arguments: Any) -> list[dict[str, Any]]:
    """The choices of one that is not."""
    answer = client.chat.completions.create(**arguments)
    return [
        {
            "content": choice.message.content or "",
            "reasoning_content": (choice.message.model_extra or {}).get("reasoning_content", ""),
            "calls": "".join(call.function.arguments for call in choice.message.tool_calls or ()),  # type: ignore[union-attr]
            "reason": choice.finish_reason,
            "logprobs": (choice.logprobs.content or []) if choice.logprobs else [],
            "usage": answer.usage,
        }
        for choice in answer.choices
    ]


def both_ways(client: OpenAI, **arguments: Any) -> list[dict[str, Any]]:
    found = whole(client, **arguments)
    assert streamed(client, **arguments) == found
    return found


@pytest.mark.parametrize("model", ["thinking", "always"])
@pytest.mark.parametrize("more", [{}, {"stop": ["STOP", "a t"]}, {"logprobs": True}, {"n": 2}])
def test_a_streamed_answer_is_split_as_the_whole(
    openai_client: OpenAI, engines: Engines, model: str, more: dict[str, Any]
) -> None:
    written = ANSWER if model == "thinking" else ANSWER.removeprefix("<think>\n")
    script(engines[model], written)
    for choice in both_ways(openai_client, model=model, messages=QUESTION, **more):
        assert choice["reasoning_content"] == THOUGHT, "no stop string ends it within the thought"
        assert choice["content"] == ("It is\n" if "stop" in more else SAID) and choice["reason"] == "stop"
        if "logprobs" in more:
            logged = b"".join(bytes(token.bytes or ()) for token in choice["logprobs"])
            assert logged.decode() == written
        thought = TOKENIZER.encode(written[: -len(f"\n\n{SAID}")], add_special_tokens=False)
        details = choice["usage"].completion_tokens_details
        assert details.reasoning_tokens == len(thought) * more.get("n", 1)


@pytest.mark.parametrize(
    ("tokens", "thought", "said"), [(12, "Hm, 🙂 STO", ""), (2, "", ""), (40, THOUGHT, "It is\na ta")]
)
def test_what_is_cut_off(
    openai_client: OpenAI, engines: Engines, tokens: int, thought: str, said: str
) -> None:
    script(engines["thinking"], ANSWER)
    found = both_ways(openai_client, model="thinking", messages=QUESTION, max_tokens=tokens)
    (choice,) = found
    assert choice["reason"] == "length"
    assert THOUGHT.startswith(choice["reasoning_content"]) and SAID.startswith(choice["content"])
    if tokens < 20:
        assert (
            choice["content"] == "" and choice["usage"].completion_tokens_details.reasoning_tokens == tokens
        )


def test_a_thought_that_nobody_wants(openai_client: OpenAI, engines: Engines) -> None:
    script(engines["thinking"], ANSWER)
    arguments: Any = {"model": "thinking", "messages": QUESTION}
    (hidden,) = both_ways(openai_client, **arguments, extra_body={"include_reasoning": False})
    (shown,) = both_ways(openai_client, **arguments)
    assert hidden == shown | {"reasoning_content": ""}
    script(engines["thinking"], SAID)
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    (without,) = both_ways(openai_client, **arguments, extra_body=off)
    assert prompt_of(engines["thinking"]).endswith("<think>\n\n</think>\n\n")
    assert without["content"] == SAID and without["reasoning_content"] == ""


def test_other_models_do_not_think(openai_client: OpenAI, engines: Engines) -> None:
    script(engines["plain"], ANSWER)
    (choice,) = both_ways(openai_client, model="plain", messages=QUESTION)
    assert choice["content"] == ANSWER and choice["usage"].completion_tokens_details is None
    script(engines["thinking"], ANSWER)
    text = openai_client.completions.create(model="thinking", prompt="a", max_tokens=500).choices[0].text
    assert text == ANSWER, "a text is no conversation"


def test_calls_and_forms_come_after_the_thought(openai_client: OpenAI, engines: Engines) -> None:
    engine = engines["thinking"]
    script(engine, f"<think>\nAsk: {CALL}\n</think>\n\n{CALL}")
    arguments: Any = {"model": "thinking", "messages": QUESTION}
    (choice,) = both_ways(openai_client, **arguments, tools=[TOOL], tool_choice="required")
    assert choice["reasoning_content"] == f"Ask: {CALL}" and choice["reason"] == "tool_calls"
    assert choice["calls"] == '{"place": "日本"}' and choice["content"] == ""
    script(engine, ANSWER)
    both_ways(openai_client, **arguments, response_format={"type": "json_object"})
    for submit in engine.submits:
        assert LLMatcher.validate_grammar(submit.grammar) == "" and "@answer" in submit.grammar
    both_ways(openai_client, **arguments)
    assert engine.submits[-1].grammar == ""


def test_what_was_thought_goes_back_to_the_template(openai_client: OpenAI, engines: Engines) -> None:
    for name in ("reasoning_content", "reasoning"):
        turns = [*QUESTION, {"role": "assistant", "content": SAID, name: THOUGHT}, *QUESTION]
        openai_client.chat.completions.create(model="thinking", messages=turns, max_tokens=1)
        assert f"assistant\n{ANSWER}<|im_end|>" in prompt_of(engines["thinking"])
