"""From the service's messages to the bodies of the HTTP API, and back. Fields have the same names in both."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from protos.loraplex_pb2 import ChatRequest, CompleteRequest, EmbedRequest, Prompt

Answer = TypeVar("Answer", bound=Message)

_TOOL_CHOICES = frozenset({"none", "auto", "required"})


def chat_body(request: ChatRequest, *, stream: bool) -> dict[str, Any]:
    """Returns the body of `/v1/chat/completions`."""
    body = _with_options(fields_of(request), stream=stream)
    for tool in body.get("tools", ()):
        tool["type"] = "function"
    for message in body.get("messages", ()):
        for call in message.get("tool_calls", ()):
            call["type"] = "function"
    choice = body.get("tool_choice", "auto")
    if choice not in _TOOL_CHOICES:
        body["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return body


def complete_body(request: CompleteRequest, *, stream: bool) -> dict[str, Any]:
    """Returns the body of `/v1/completions`."""
    body = _with_options(fields_of(request), stream=stream)
    body.pop("prompts", None)
    return body | {"prompt": [_prompt_of(prompt) for prompt in request.prompts]}


def embed_body(request: EmbedRequest) -> dict[str, Any]:
    """Returns the body of `/v1/embeddings`, with vectors as base64."""
    body = fields_of(request)
    body.pop("inputs", None)
    inputs = [_prompt_of(prompt) for prompt in request.inputs]
    return body | {"input": inputs, "encoding_format": "base64"}


def fields_of(message: Message) -> dict[str, Any]:
    """Returns the fields of a message that are set, as JSON has them; unlike protobuf's own JSON, with
    numbers of 64 bits as numbers.
    """
    return {field.name: _value_of(field, value) for field, value in message.ListFields()}


def answer_of(kind: type[Answer], body: dict[str, Any]) -> Answer:
    """Returns an answer of the HTTP API as a message. Fields that the message lacks are left out."""
    for choice in body.get("choices", ()):
        logprobs = choice.get("logprobs")
        if logprobs and "token_logprobs" in logprobs:
            choice["logprobs"] = _text_logprobs(logprobs)
    return ParseDict(body, kind(), ignore_unknown_fields=True)


def _with_options(body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """The body with the options among its fields."""
    options = body.pop("options", {})
    extra = options.pop("extra", {})
    body = extra | options | body
    return body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body


def _prompt_of(prompt: Prompt) -> str | list[int]:
    return list(prompt.tokens.ids) if prompt.HasField("tokens") else prompt.text


def _value_of(field: FieldDescriptor, value: Any) -> Any:
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        return list(value) if field.is_repeated else value
    kind = field.message_type
    assert kind is not None, "the field is a message"
    if kind.GetOptions().map_entry:
        return {str(key): item for key, item in value.items()}
    if field.is_repeated:
        return [fields_of(item) for item in value]
    return _plain(MessageToDict(value)) if isinstance(value, Struct) else fields_of(value)


def _plain(value: Any) -> Any:
    """JSON of a Struct, whose numbers are all floats, with whole numbers as such."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text_logprobs(logprobs: dict[str, Any]) -> dict[str, Any]:
    """Text completions' logprobs without nulls, which a list of messages cannot hold."""
    return logprobs | {
        "token_logprobs": ["NaN" if each is None else each for each in logprobs["token_logprobs"]],
        "top_logprobs": [{"logprobs": each or {}} for each in logprobs["top_logprobs"] or ()],
    }
