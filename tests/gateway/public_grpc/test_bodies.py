"""What messages become: the same bodies that come over HTTP, judged the same."""

from __future__ import annotations

import math
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.struct_pb2 import Struct
from openai import OpenAI

from gateway.errors import ApiError
from gateway.json_bounds import MAX_FIELDS, MAX_VALUES
from gateway.public_grpc.bodies import fields_of
from protos import loraplex_pb2 as pb
from protos.loraplex_pb2_grpc import InferenceStub
from tests.gateway.fake_engine import MODEL
from tests.gateway.local_stack import LocalStack
from tests.gateway.public_grpc.asking import HI, OPENAI_HI, bearer, error_of


def test_structs_and_further_fields_reach_the_body(stack: LocalStack, stub: InferenceStub, key: str) -> None:
    schema, extra = Struct(), Struct()
    schema.update({"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}})
    extra.update({"metadata": {"run": "7"}, "include_stop_str_in_output": True})
    options = pb.GenerationOptions(max_tokens=4, guided_json=schema, extra=extra)
    stub.Complete(
        pb.CompleteRequest(model=MODEL, prompts=[pb.Prompt(text="a")], options=options), metadata=bearer(key)
    )
    assert '"maximum":3' in stack.engines[0].submits[-1].grammar.replace(" ", "").replace("\\", "")
    extra.update({"no_such_field": 1})
    options.extra.CopyFrom(extra)
    with pytest.raises(grpc.RpcError) as refused:
        stub.Complete(
            pb.CompleteRequest(model=MODEL, prompts=[pb.Prompt(text="a")], options=options),
            metadata=bearer(key),
        )
    assert "no_such_field" in error_of(refused.value).message


def test_a_further_field_cannot_make_a_call_a_stream(stub: InferenceStub, key: str) -> None:
    extra = Struct()
    extra.update({"stream": True, "stream_options": {"include_usage": True}})
    options = pb.GenerationOptions(max_tokens=2, ignore_eos=True, extra=extra)
    answer = stub.Chat(pb.ChatRequest(model=MODEL, messages=HI, options=options), metadata=bearer(key))
    assert answer.usage.completion_tokens == 2


TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"type": "object"}}}


def test_tools_are_those_of_http(stack: LocalStack, stub: InferenceStub, client: OpenAI, key: str) -> None:
    function = pb.FunctionDefinition(name="weigh")
    function.parameters.update({"type": "object"})
    call = pb.ToolCall(id="1", function=pb.FunctionCall(name="weigh", arguments="{}"))
    said = [
        *HI,
        pb.ChatMessage(role="assistant", tool_calls=[call]),
        pb.ChatMessage(role="tool", tool_call_id="1", content="7"),
    ]
    options = pb.GenerationOptions(max_tokens=1)
    asked = pb.ChatRequest(
        model=MODEL, messages=said, tools=[pb.Tool(function=function)], tool_choice="weigh", options=options
    )
    stub.Chat(asked, metadata=bearer(key))
    called = {"id": "1", "type": "function", "function": {"name": "weigh", "arguments": "{}"}}
    messages = [
        *OPENAI_HI,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    choice: Any = {"type": "function", "function": {"name": "weigh"}}
    tools: Any = [TOOL]
    client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, tool_choice=choice, max_tokens=1
    )
    ours, https = stack.engines[0].submits[-2:]
    assert ours.prompt_tokens == https.prompt_tokens and ours.grammar == https.grammar != ""


@pytest.mark.parametrize(
    ("further", "param"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weigh"}}}, None),
        ({"tools": [TOOL], "tool_choice": "weigh"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
        ({"tools": None, "tool_choice": None}, None),
        ({"tools": 5}, "tools"),
        ({"tools": ["a"]}, "tools"),
        ({"messages": None}, "messages"),
        ({"messages": ["a"]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
    ],
    ids=["named tool", "name", "number", "nulls", "tools", "tool", "no messages", "message", "tool calls"],
)
def test_further_fields_are_judged_as_https(
    stub: InferenceStub, client: OpenAI, key: str, further: dict[str, Any], param: str | None
) -> None:
    extra = Struct()
    extra.update(further)
    asked = pb.ChatRequest(model=MODEL, options=pb.GenerationOptions(max_tokens=1, extra=extra))
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
    if "messages" not in further:
        asked.messages.extend(HI)
        body["messages"] = OPENAI_HI
    if param is None:
        stub.Chat(asked, metadata=bearer(key))
        client.post("/chat/completions", cast_to=object, body=body | further)
        return
    with pytest.raises(grpc.RpcError) as refused:
        stub.Chat(asked, metadata=bearer(key))
    with pytest.raises(openai.BadRequestError) as own:
        client.post("/chat/completions", cast_to=object, body=body | further)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_of(refused.value)
    assert (error.param, error.message) == (own.value.param, own.value.body["message"])  # type: ignore[index]
    assert error.param.startswith(param)


def refused_extra(value: Any) -> pb.ChatRequest:
    extra = Struct()
    extra.update({"seed": value})
    return refused_options(extra=extra)


def refused_options(**options: Any) -> pb.ChatRequest:
    return pb.ChatRequest(model=MODEL, messages=HI, options=pb.GenerationOptions(**options))


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (refused_extra(1e300), "invalid_value"),
        (refused_extra(math.nan), "invalid_json"),
        (refused_options(temperature=math.nan), "invalid_json"),
        (refused_options(repetition_penalty=math.inf), "invalid_json"),
        (refused_options(logit_bias={7: 1.0, 8: -math.inf}), "invalid_json"),
        (refused_extra([0] * (MAX_VALUES + 1)), "too_complex"),
        (pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage()] * (MAX_FIELDS + 1)), "too_complex"),
    ],
    ids=["too large", "not a number", "NaN", "infinite", "infinite in a map", "values", "messages"],
)
def test_what_makes_no_body_is_refused(
    stub: InferenceStub, key: str, request_: pb.ChatRequest, word: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.Chat(request_, metadata=bearer(key))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(refused.value).code == word


def test_repeated_numbers_are_finite() -> None:
    assert fields_of(pb.Embedding(values=[0.5, -2])) == {"values": [0.5, -2]}
    with pytest.raises(ApiError) as refused:
        fields_of(pb.Embedding(values=[0.5, math.inf]))
    assert (refused.value.status, refused.value.param) == (400, "values")
