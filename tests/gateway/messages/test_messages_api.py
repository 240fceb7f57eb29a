"""Messages through Anthropic's own client: what models see, and what clients get, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel, TypeAdapter

from examples import anthropic_client
from gateway.schemas.message_answers import MessageAnswer, MessageEvent
from tests.gateway.fake_engine import FakeEngine, expected_text
from tests.gateway.local_stack import LocalStack
from tests.gateway.messages.conftest import prompt_of, script

Engines = dict[str, FakeEngine]
Client = anthropic.Anthropic
QUESTION: Any = [{"role": "user", "content": "Is it raining? 🙂"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Looks out of the window.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
TIME: Any = {"name": "time", "input_schema": {"type": "object", "properties": {}}}
CALLS = [("weather", {"place": 'Zürich "→🙂'}), ("time", {})]


def written(*calls: tuple[str, Any]) -> str:
    """Calls as the model writes them."""
    objects = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls]
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def without_ids(message: anthropic.types.Message) -> Any:
    """A message but for what is made up for each anew, and what the client adds to one that it streamed."""
    found = message.model_dump(exclude={"id"})
    for block in found["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            block.pop("id")
    return found


def both_ways(client: Client, **arguments: Any) -> anthropic.types.Message:
    """Asks streamed and not, and returns the one answer."""
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        streamed = stream.get_final_message()
    assert without_ids(streamed) == without_ids(whole)
    return whole


@pytest.mark.parametrize(
    "arguments",
    [
        {"extra_body": {"seed": 7}, "max_tokens": 150},
        {"extra_body": {"seed": 11}, "max_tokens": 200, "stop_sequences": ["w1", "🙂", "日本w"]},
        {"extra_body": {"temperature": 0}, "max_tokens": 30},
        {"extra_body": {"seed": 3, "top_p": 0.5, "top_k": 9}, "max_tokens": 1800},
    ],
)
def test_a_streamed_message_is_the_whole_one(
    client: Client, engines: Engines, arguments: dict[str, Any]
) -> None:
    message = both_ways(client, model="plain", messages=QUESTION, **arguments)
    text = "".join(block.text for block in message.content if block.type == "text")
    full = expected_text(engines["plain"].submits[0])
    if message.stop_reason == "stop_sequence":
        assert message.stop_sequence in arguments["stop_sequences"]
        assert full.startswith(f"{text}{message.stop_sequence}")
    else:
        assert text == full and message.stop_sequence is None and len(message.content) == 1
        was_cut = message.usage.output_tokens == arguments["max_tokens"]
        assert message.stop_reason == ("max_tokens" if was_cut else "end_turn")
    assert message.model == "plain" and message.role == "assistant" and message.id.startswith("msg_")


async def test_the_async_client_gets_the_same(messages_stack: LocalStack, key: str, client: Client) -> None:
    arguments: Any = {"model": "plain", "messages": QUESTION, "max_tokens": 40, "extra_body": {"seed": 5}}
    async with anthropic.AsyncAnthropic(base_url=messages_stack.url, api_key=key, max_retries=0) as own:
        whole = await own.messages.create(**arguments)
        async with own.messages.stream(**arguments) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            streamed = await stream.get_final_message()
    assert without_ids(whole) == without_ids(streamed) == without_ids(client.messages.create(**arguments))
    assert text == whole.content[0].text  # type: ignore[union-attr]


def test_the_raw_answers_are_anthropic_s(client: Client, engines: Engines) -> None:
    script(engines["hermes"], "So:\n" + written(*CALLS))
    arguments: Any = {"model": "hermes", "messages": QUESTION, "tools": [WEATHER, TIME], "max_tokens": 500}
    raw = client.messages.with_raw_response.create(**arguments)
    assert raw.headers["request-id"] == raw.headers["x-request-id"] == raw.parse()._request_id
    TypeAdapter(MessageAnswer).validate_json(raw.http_response.content, extra="forbid")
    raw = client.messages.with_raw_response.create(**arguments, stream=True)
    raw.http_response.read()
    assert raw.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in raw.http_response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(TypeAdapter(MessageEvent).validate_json(data.removeprefix("data: "), extra="forbid"))
        assert name == f"event: {events[-1]['type']}"
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    open_block, blocks = None, []
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == len(blocks)
                open_block = event["index"]
                blocks.append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    assert open_block is None and [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    assert all(block["input"] == {} for block in blocks[1:])


def test_usage_counts_as_anthropic_does(client: Client, engines: Engines) -> None:
    prompt: Any = {
        "model": "hermes",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": QUESTION,
        "tools": [WEATHER],
    }
    script(engines["hermes"], "No end of words.")
    counted = client.messages.count_tokens(**prompt).input_tokens
    assert not engines["hermes"].submits, "counting asks no engine"
    usage = client.messages.create(**prompt, max_tokens=3).usage
    assert engines["hermes"].submits[0].max_tokens == usage.output_tokens == 3
    assert counted == len(engines["hermes"].submits[0].prompt_tokens)
    assert usage.cache_read_input_tokens == counted // 2  # as the fake engine says
    assert usage.input_tokens == counted - counted // 2
    with client.messages.stream(**prompt, max_tokens=3) as stream:
        first = next(iter(stream))
        assert first.type == "message_start"
        assert first.message.usage.input_tokens == usage.input_tokens
        assert first.message.usage.cache_read_input_tokens == usage.cache_read_input_tokens


# ---- what the model sees --------------------------------------------------------------------------------


def test_messages_of_one_role_in_a_row_are_one(client: Client, engines: Engines) -> None:
    messages: Any = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [{"type": "text", "text": "e"}]},
        {"role": "user", "content": "f"},
    ]
    client.messages.create(model="plain", system="s", messages=messages, max_tokens=1)
    turns = [("system", "s"), ("user", "a\nb\nc"), ("assistant", "d\ne"), ("user", "f")]
    rendered = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert prompt_of(engines["plain"]) == rendered + "<|im_start|>assistant\n"


def test_a_last_message_of_the_assistant_is_continued(client: Client, engines: Engines) -> None:
    beginning: Any = {"role": "assistant", "content": "It is"}
    client.messages.create(model="plain", messages=[*QUESTION, beginning], max_tokens=1)
    assert prompt_of(engines["plain"]).endswith("<|im_start|>assistant\nIt is")
    empty: Any = {"role": "assistant", "content": ""}
    client.messages.create(model="plain", messages=[*QUESTION, empty], max_tokens=1)
    client.messages.create(model="plain", messages=QUESTION, max_tokens=1)
    *_, with_empty, without = engines["plain"].submits
    assert with_empty.prompt_tokens == without.prompt_tokens


def test_calls_and_results_go_back(client: Client, engines: Engines) -> None:
    engine = engines["hermes"]
    script(engine, "So:\n" + written(*CALLS))
    arguments: Any = {"model": "hermes", "tools": [WEATHER, TIME], "max_tokens": 500}
    answer = both_ways(client, messages=QUESTION, **arguments)
    assert answer.stop_reason == "tool_use"
    text, *calls = answer.content
    assert text.type == "text" and text.text == "So:"
    assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == CALLS
    ids = [call.id for call in calls if call.type == "tool_use"]
    assert all(call_id.startswith("toolu_") for call_id in ids) and ids[0] != ids[1]
    results: Any = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "no clock", "is_error": True},
        {"type": "text", "text": "And?"},
    ]
    turns: Any = [
        *QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    client.messages.create(messages=turns, **arguments)
    assert prompt_of(engine).endswith(
        f"<|im_start|>assistant\nSo:\n{written(*CALLS)}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nError: no clock\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


# ---- tools ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "held", "free"),
    [
        (None, True, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, True),
        ({"type": "any"}, True, False),
        ({"type": "tool", "name": "time"}, True, False),
        ({"type": "none"}, False, True),
    ],
)
def test_calls_are_held_to_what_is_chosen(
    client: Client, engines: Engines, choice: Any, held: bool, free: bool
) -> None:
    more = {} if choice is None else {"tool_choice": choice}
    client.messages.create(model="hermes", messages=QUESTION, tools=[WEATHER, TIME], max_tokens=1, **more)
    (submit,) = engines["hermes"].submits
    assert bool(submit.grammar) is held, "the input of a call is always an object"
    if not held:
        assert list(submit.sampling.bias_values) == [-100, -100], "and here there are no calls"
        return
    assert LLMatcher.validate_grammar(submit.grammar) == ""
    assert ("start: text" in submit.grammar) is free
    assert ("call_1" in submit.grammar) is (choice is None or "name" not in choice)
    (calls,) = [line for line in submit.grammar.splitlines() if line.startswith("calls:")]
    assert calls.endswith("*") is (choice in (None, {"type": "any"})), "else there is one call at most"


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"place": "Zürich", "da', {"place": "Zürich"}),
        ('{"place": "Zür', {}),
        ('{"a": [1, {"b": 2', {"a": [1, {"b": 2}]}),
        ("{", {}),
    ],
)
def test_an_input_that_is_cut_off_is_what_was_whole(
    client: Client, engines: Engines, arguments: str, given: Any
) -> None:
    engine = engines["hermes"]
    script(engine, f'<tool_call>\n{{"name": "weather", "arguments": {arguments}')
    message = both_ways(
        client, model="hermes", messages=QUESTION, tools=[WEATHER], max_tokens=len(engine.scripts[0])
    )
    (call,) = message.content
    assert call.type == "tool_use" and call.input == given
    assert message.stop_reason == "max_tokens"


class Forecast(BaseModel):
    """What an answer is parsed as."""

    place: str
    celsius: int


def test_structured_output(client: Client, engines: Engines) -> None:
    script(engines["plain"], '{"place": "Zürich 🙂", "celsius": 3}')
    message = client.messages.parse(model="plain", messages=QUESTION, max_tokens=100, output_format=Forecast)
    assert message.parsed_output == Forecast(place="Zürich 🙂", celsius=3)
    assert LLMatcher.validate_grammar(engines["plain"].submits[0].grammar) == ""
    with pytest.raises(anthropic.BadRequestError, match=r"'output_config\.format\.schema' cannot be used"):
        client.messages.create(
            model="plain",
            messages=QUESTION,
            max_tokens=100,
            output_config={"format": {"type": "json_schema", "schema": {"type": "thing"}}},
        )


# ---- thinking -------------------------------------------------------------------------------------------

THOUGHT = "<think>\nHm, 🙂 <b>\n\nwell\n</think>\n\nIt is raining."
ENABLED: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize("model", ["thinking", "always"])
def test_what_is_thought_is_a_block_of_its_own(client: Client, engines: Engines, model: str) -> None:
    script(engines[model], THOUGHT if model == "thinking" else THOUGHT.removeprefix("<think>\n"))
    arguments: Any = {"model": model, "messages": QUESTION, "max_tokens": 1800}
    message = both_ways(client, thinking=ENABLED, stop_sequences=["Hm"], **arguments)
    thought, text = message.content
    assert thought.type == "thinking" and thought.thinking == "Hm, 🙂 <b>\n\nwell"
    assert text.type == "text" and text.text == "It is raining." and message.stop_reason == "end_turn"
    details = message.usage.output_tokens_details
    assert details is not None and 0 < details.thinking_tokens < message.usage.output_tokens
    ends = prompt_of(engines[model])
    assert ends.endswith("assistant\n<think>\n" if model == "always" else "assistant\n")
    for hidden in ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}):
        if model == "thinking" and not hidden:
            continue  # below: it does not think then
        assert [block.type for block in both_ways(client, **arguments, **hidden).content] == ["text"]
    turns: Any = [*QUESTION, {"role": "assistant", "content": message.content}, *QUESTION]
    client.messages.create(model=model, messages=turns, max_tokens=1)
    shown = "Hm, 🙂" in prompt_of(engines[model])
    assert shown is (model == "thinking"), "the template decides"


def test_a_model_with_a_switch_is_told_whether_to_think(client: Client, engines: Engines) -> None:
    engine = engines["thinking"]
    off: Any
    for off in ({}, {"thinking": {"type": "disabled"}}):
        client.messages.create(model="thinking", messages=QUESTION, max_tokens=1, **off)
        assert prompt_of(engine).endswith("assistant\n<think>\n\n</think>\n\n")
    counted = client.messages.count_tokens(model="thinking", messages=QUESTION)
    assert counted.input_tokens == len(engine.submits[-1].prompt_tokens)
    client.messages.create(model="thinking", messages=QUESTION, max_tokens=1, thinking={"type": "adaptive"})
    assert prompt_of(engine).endswith("assistant\n")
    with pytest.raises(anthropic.BadRequestError, match="knows of no thinking: leave 'thinking' out"):
        client.messages.create(model="plain", messages=QUESTION, max_tokens=1800, thinking=ENABLED)


def test_calls_come_after_the_thought(client: Client, engines: Engines) -> None:
    engine = engines["thinking"]
    script(engine, f"<think>\nAsk: {written(CALLS[1])}\n</think>\n\n{written(CALLS[0])}")
    message = both_ways(
        client,
        model="thinking",
        messages=QUESTION,
        tools=[WEATHER, TIME],
        tool_choice={"type": "any"},
        thinking=ENABLED,
        max_tokens=1500,
    )
    thought, call = message.content
    assert thought.type == "thinking" and thought.thinking == f"Ask: {written(CALLS[1])}"
    assert call.type == "tool_use" and (call.name, call.input) == CALLS[0]
    assert message.stop_reason == "tool_use"
    assert "@answer" in engine.submits[0].grammar


def test_the_example(
    messages_stack: LocalStack,
    key: str,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script(engines["plain"], "Arr 🙂")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", messages_stack.url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", key)
    monkeypatch.setattr("sys.argv", ["anthropic_client.py", "--model", "plain", "Who are you?"])
    anthropic_client.main()
    (submit,) = engines["plain"].submits
    count = len(engines["plain"].scripts[0]) + 1  # and the end
    assert capsys.readouterr().out == f"Arr 🙂\n{len(submit.prompt_tokens)} tokens in, {count} out\n"
