"""Tool calls through the official client: what the model sees of tools, and what clients see of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from openai import OpenAI
from pydantic import BaseModel, TypeAdapter
from tokenizers import Tokenizer

from gateway.schemas.answers import ChatCompletion, ChatCompletionChunk
from gateway.tools.forms import HERMES, LLAMA, MISTRAL, form_of
from tests.gateway.fake_engine import EOS, FakeEngine
from tests.gateway.local_stack import LocalStack
from tests.gateway.tool_templates import TEMPLATES, tokenizer_files

QUESTION: Any = [{"role": "user", "content": "Is it raining?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]

TOKENIZER = Tokenizer.from_buffer(tokenizer_files("")["tokenizer.json"])
Engines = dict[str, FakeEngine]


def written(form: str, *calls: tuple[str, str]) -> str:
    """Calls as a model writes them."""
    key = "parameters" if form == "llama" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    return f"[TOOL_CALLS] [{', '.join(objects)}]" if form == "mistral" else "; ".join(objects)


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def script(engine: FakeEngine, *answers: str) -> None:
    engine.scripts = [tokens(answer) for answer in answers]


def prompt_of(engine: FakeEngine) -> str:
    return TOKENIZER.decode(engine.submits[-1].prompt_tokens, skip_special_tokens=False)


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


CALLS = [("weather", '{"place": "Zürich \\"→🙂"}'), ("time", "{}")]


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True}, {"stop": ["ric"], "n": 2}, {"max_tokens": 60, "n": 2}]
)
def test_a_streamed_answer_adds_up_to_the_whole(
    client: OpenAI, engines: Engines, form: str, more: dict[str, Any]
) -> None:
    before = "" if form == "llama" else "Grüß <b>\n"
    script(engines[form], before + written(form, *CALLS), "No, it is {not} <tool [")
    arguments: Any = {"model": form, "messages": QUESTION, "tools": TOOLS} | more
    whole = client.chat.completions.create(**arguments)
    with client.chat.completions.stream(**arguments) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert one.finish_reason == other.finish_reason
        assert one.message.content == other.message.content
        assert one.logprobs == other.logprobs
        assert calls_of(one) == calls_of(other)
    first = whole.choices[0]
    if more.keys() <= {"logprobs"}:
        assert first.finish_reason == "tool_calls"
        assert first.message.content == (before.rstrip() or None)
        assert calls_of(first) == CALLS
    else:
        assert first.finish_reason == ("length" if "max_tokens" in more else "tool_calls")
        assert [name for name, _ in calls_of(first)] == ["weather"]
        assert CALLS[0][1].startswith(calls_of(first)[0][1].rstrip("\ufffd"))
    if "logprobs" in more:
        assert first.logprobs is not None
        logged = [bytes(token.bytes or ()) for token in first.logprobs.content or ()]
        assert b"".join(logged).decode() == before + written(form, *CALLS)
    if "n" in more:
        assert whole.choices[1].message.content == "No, it is {not} <tool ["
        assert whole.choices[1].message.tool_calls is None
        assert whole.choices[1].finish_reason == "stop"


def test_deltas_are_openai_s(client: OpenAI, engines: Engines) -> None:
    most_pieces = 0
    for _ in range(20):  # a machine that holds the gateway up for an answer's time has it in one piece
        most_pieces = max(most_pieces, pieces_of_first_call(client, engines))
        if most_pieces > 1:
            break
    assert most_pieces > 1, "arguments come as they are written"


def pieces_of_first_call(client: OpenAI, engines: Engines) -> int:
    """In how many deltas its arguments came, all of which are as OpenAI has them."""
    script(engines["hermes"], "So:\n" + written("hermes", *CALLS))
    chunks = list(client.chat.completions.create(model="hermes", messages=QUESTION, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    at = next(i for i, delta in enumerate(deltas) if "tool_calls" in delta)
    assert "".join(delta["content"] for delta in deltas[1:at]) == "So:"
    parts = [part for delta in deltas[at:-1] for part in delta["tool_calls"]]
    heads = [part for part in parts if "id" in part]
    assert [(part["index"], part["type"], part["function"]) for part in heads] == [
        (0, "function", {"name": "weather", "arguments": ""}),
        (1, "function", {"name": "time", "arguments": ""}),
    ]
    assert all(part["id"].startswith("call_") for part in heads) and heads[0]["id"] != heads[1]["id"]
    rest = [part for part in parts if part not in heads]
    assert all(part.keys() == {"index", "function"} for part in rest)
    pieces = [[part["function"]["arguments"] for part in rest if part["index"] == i] for i in range(2)]
    assert ["".join(of_call) for of_call in pieces] == [arguments for _, arguments in CALLS]
    assert "" not in pieces[0] + pieces[1]
    assert deltas[-1] == {} and chunks[-1].choices[0].finish_reason == "tool_calls"
    return len(pieces[0])


def test_answers_are_what_the_description_says(
    client: OpenAI, tool_stack: LocalStack, engines: Engines
) -> None:
    script(engines["mistral"], "Hm " + written("mistral", *CALLS))
    body = {"model": "mistral", "messages": QUESTION, "tools": TOOLS}
    headers = {"authorization": f"Bearer {client.api_key}"}
    url = f"{tool_stack.url}/v1/chat/completions"
    whole = httpx.post(url, json=body, headers=headers).json()
    TypeAdapter(ChatCompletion).validate_python(whole, strict=True)
    streamed = httpx.post(url, json=body | {"stream": True}, headers=headers).text
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    for event in events:
        TypeAdapter(ChatCompletionChunk).validate_json(event, strict=True)


class Place(BaseModel):
    """A client's model of the arguments."""

    place: str


def test_the_client_parses_arguments(client: OpenAI, engines: Engines) -> None:
    script(engines["hermes"], written("hermes", ("Place", '{"place": "Bern"}')))
    answer = client.chat.completions.parse(
        model="hermes", messages=QUESTION, tools=[openai.pydantic_function_tool(Place)]
    )
    (call,) = list(answer.choices[0].message.tool_calls or ())
    assert call.function.parsed_arguments == Place(place="Bern")
    assert engines["hermes"].submits[-1].grammar  # pydantic's tools are strict
    # What the client has parsed, it sends along with the message's next turn.
    messages: Any = [*QUESTION, answer.choices[0].message]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "no"})
    client.chat.completions.create(model="hermes", messages=messages, tools=TOOLS, max_tokens=1)
    assert '"arguments": {"place": "Bern"}}' in prompt_of(engines["hermes"])


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
def test_the_template_sees_tools_calls_and_results(client: OpenAI, engines: Engines, form: str) -> None:
    call = {"id": "call_0123456789", "type": "function",
            "function": {"name": "weather", "arguments": '{"place": "Bern"}'}}  # fmt: skip
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": [{"type": "text", "text": "no"}]},
    ]
    client.chat.completions.create(model=form, messages=messages, tools=TOOLS, max_tokens=1)
    prompt = prompt_of(engines[form])
    for name in ("weather", "time"):
        assert re.search(rf'{{\s*"type": "function",\s*"function": {{\s*"name": "{name}",\s*"desc', prompt)
    assert re.search(r'"parameters": {\s*"type": "object",\s*"properties": {\s*"place"', prompt)
    if form == "mistral":
        # Its templates take ids of nine characters only; a result has the same one as its call.
        (own_id,) = re.findall(r"\[TOOL_RESULTS\] (.{9})no\[/TOOL_RESULTS\]", prompt)
        assert f'"id": "{own_id}"' in prompt or own_id.isalnum()
    assert '"name": "weather", "' in prompt and ': {"place": "Bern"}}' in prompt
    assert prompt.index("Bern") < prompt.index("no", prompt.index("Bern"))


@pytest.mark.parametrize("arguments", ['{"place": "Be', "[" * 1500, "3", r'{"a": "\ud800"}'])
def test_arguments_that_are_no_object_are_shown_as_text(
    client: OpenAI, engines: Engines, arguments: str
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages: Any = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    client.chat.completions.create(model="hermes", messages=messages, max_tokens=1)
    prompt = prompt_of(engines["hermes"])
    assert f'"arguments": {json.dumps(arguments)}' in prompt


def test_arguments_count_as_structure(client: OpenAI) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "[]," * 50_000}}
    messages: Any = [*QUESTION, *[{"role": "assistant", "tool_calls": [call]}] * 2]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="hermes", messages=messages, max_tokens=1)
    assert refused.value.code == "too_complex"


def test_tokens_are_counted_with_tools(tool_stack: LocalStack, client: OpenAI, engines: Engines) -> None:
    client.chat.completions.create(model="hermes", messages=QUESTION, tools=TOOLS, max_tokens=1)
    headers = {"authorization": f"Bearer {client.api_key}"}
    body = {"model": "hermes", "messages": QUESTION, "tools": TOOLS}
    found = httpx.post(f"{tool_stack.url}/tokenize", json=body, headers=headers).json()
    assert found["tokens"] == list(engines["hermes"].submits[-1].prompt_tokens)
    refused = httpx.post(f"{tool_stack.url}/tokenize", json=body | {"model": "plain"}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("tool_choice", ["auto", "none", "required"])
@pytest.mark.parametrize("model", ["plain", "shy"])
def test_a_template_without_tools_refuses_them(client: OpenAI, model: str, tool_choice: Any) -> None:
    arguments: Any = {"model": model, "tools": TOOLS, "tool_choice": tool_choice, "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="does not show tools") as refused:
        client.chat.completions.create(messages=QUESTION, **arguments)
    assert refused.value.param == "tools"
    if model == "shy":
        client.chat.completions.create(messages=[{"role": "system", "content": ""}], **arguments)


def test_no_call_is_read_where_none_is_allowed(client: OpenAI, engines: Engines) -> None:
    script(engines["hermes"], "a <tool_call> b")
    answer = client.chat.completions.create(
        model="hermes", messages=QUESTION, tools=TOOLS, tool_choice="none", logit_bias={"70": 5}
    )
    message = answer.choices[0].message
    assert (message.content, message.tool_calls) == ("a <tool_call> b", None)
    assert answer.choices[0].finish_reason == "stop"
    assert "weather" in prompt_of(engines["hermes"])
    sampling = engines["hermes"].submits[-1].sampling
    bias = dict(zip(sampling.bias_tokens, sampling.bias_values, strict=True))
    markers = {TOKENIZER.token_to_id(text) for text in ("<tool_call>", "</tool_call>")}
    assert bias == dict.fromkeys(markers, -100.0) | {70: 5.0}


ENGINE_TOKENIZER = LLTokenizer(TOKENIZER.to_str(), eos_token=EOS)
NAMED = {"type": "function", "function": {"name": "time"}}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
GOOD, BAD = ("weather", '{"place": "x"}'), ("weather", '{"place": 1}')
TIMED, OTHER = ("time", "{}"), ("other", "{}")


def accepted(grammar: str, text: str) -> bool:
    matcher = LLMatcher(ENGINE_TOKENIZER, grammar, log_level=0)
    assert not matcher.get_error()
    return matcher.try_consume_tokens(tokens(text)) == len(tokens(text)) and matcher.is_accepting()


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"tool_choice": "required"}, [[GOOD], [TIMED], [GOOD, TIMED]], [[BAD], [OTHER], "text", ""]),
        ({"tool_choice": NAMED}, [[TIMED]], [[GOOD], [TIMED, TIMED], [("time", '{"a": 1}')], "text"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [[GOOD]], [[GOOD, TIMED], "text"]),
        ({"tools": [STRICT, TIME]}, [[GOOD], [("time", '{"a": 1}')], "any →text", ""], [[BAD], [OTHER]]),
        ({"parallel_tool_calls": False}, [[GOOD], [BAD], "any text"], [[GOOD, TIMED], [OTHER]]),
        ({"response_format": {"type": "json_object"}}, [[GOOD], [BAD], '{"x": [1]}'], ["text", "[]"]),
    ],
)
def test_answers_are_held_to_calls(
    client: OpenAI, engines: Engines, form: str, fields: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    client.chat.completions.create(
        **({"model": form, "messages": QUESTION, "tools": TOOLS, "max_tokens": 1} | fields)
    )
    grammar = engines[form].submits[-1].grammar

    def fits(answer: Any) -> bool:
        return accepted(grammar, answer if isinstance(answer, str) else written(form, *answer))

    if form == "llama":  # whose templates can show one call a message only
        good = [answer for answer in good if isinstance(answer, str) or len(answer) == 1]
    assert [answer for answer in good if not fits(answer)] == []
    assert [answer for answer in bad if fits(answer)] == []
    if form != "llama":  # where text goes before a call, it does so as far as text is allowed
        assert fits("Let me <see>. " + written(form, *good[0])) == ("any" in str(good))


def test_free_calls_have_no_grammar(client: OpenAI, engines: Engines) -> None:
    client.chat.completions.create(model="hermes", messages=QUESTION, tools=TOOLS, max_tokens=1)
    assert engines["hermes"].submits[-1].grammar == ""


@pytest.mark.parametrize("fields", [{"strict": True}, {}])
def test_a_schema_that_cannot_be_held_to_is_refused_where_it_must_be(
    client: OpenAI, engines: Engines, fields: dict[str, Any]
) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"not": {}}} | fields}
    arguments: Any = {"model": "hermes", "messages": QUESTION, "tools": [WEATHER, bad], "max_tokens": 1}
    if not fields:
        client.chat.completions.create(**arguments)
        arguments["tool_choice"] = "required"
    with pytest.raises(openai.BadRequestError, match="not") as refused:
        client.chat.completions.create(**arguments)
    assert refused.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("schemas", "keyword", "param"),
    [
        ([{"multipleOf": 10_007}], "multipleOf", "tools[0].function.parameters"),
        ([{"multipleOf": 97}, {"multipleOf": 1009}], "multipleOf", "tools"),
        ([{"exclusiveMinimum": 0, "maximum": 0.5}], "exclusiveMinimum", "tools[0].function.parameters"),
    ],
)
def test_schemas_that_are_too_much_alone_or_together_are_refused(
    client: OpenAI, schemas: Sequence[Any], keyword: str, param: str
) -> None:
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": f"f{index}",
                "parameters": {"type": "object", "properties": {"a": schema}},
            },
        }
        for index, schema in enumerate(schemas)
    ]
    arguments: Any = {"model": "hermes", "messages": QUESTION, "tools": tools, "max_tokens": 1}
    client.chat.completions.create(**arguments)  # held to no schema
    with pytest.raises(openai.BadRequestError, match=keyword) as refused:
        client.chat.completions.create(**arguments, tool_choice="required")
    assert (refused.value.param, refused.value.code) == (param, "invalid_structure")


@pytest.mark.parametrize(("depth", "strict"), [(300, "true"), (1000, "true"), (1000, "false")])
def test_a_schema_that_is_nested_deeply_is_refused(
    client: OpenAI, tool_stack: LocalStack, depth: int, strict: str
) -> None:
    schema = '{"items":' * depth + "{}" + "}" * depth
    function = f'{{"name": "f", "strict": {strict}, "parameters": {schema}}}'
    rest = json.dumps({"model": "hermes", "messages": QUESTION, "max_tokens": 1})
    body = f'{{"tools": [{{"type": "function", "function": {function}}}], {rest[1:]}'
    headers = {"authorization": f"Bearer {client.api_key}", "content-type": "application/json"}
    answer = httpx.post(f"{tool_stack.url}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400, answer.text


def test_free_text_in_another_form_excludes_calls(client: OpenAI) -> None:
    arguments: Any = {"model": "hermes", "messages": QUESTION, "tools": TOOLS, "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="excludes 'tools'") as refused:
        client.chat.completions.create(**arguments, extra_body={"guided_regex": "a+"})
    assert refused.value.param == "guided_regex"
    client.chat.completions.create(**arguments, tool_choice="none", extra_body={"guided_regex": "a+"})


def test_every_template_is_known() -> None:
    found = {name: form_of(source) for name, source in TEMPLATES.items()}
    without = {"plain": None, "always": None}
    like_hermes = dict.fromkeys(("hermes", "shy", "thinking"), HERMES)
    assert found == {"llama": LLAMA, "mistral": MISTRAL} | like_hermes | without
    assert form_of(TEMPLATES["hermes"].replace("<tool_call>", "<tool_call><function=x>")) is None
    assert form_of(TEMPLATES["hermes"].replace("tools", "things")) is None
    assert form_of(None) is None
