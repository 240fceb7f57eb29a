"""From the service's messages to the bodies of the HTTP API, and back. Fields have the same names in both."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value

from gateway.errors import invalid_request
from gateway.json_bounds import MAX_FIELDS, MAX_VALUES, too_much
from protos.loraplex_pb2 import ChatRequest, CompleteRequest, EmbedRequest, Prompt

Answer = TypeVar("Answer", bound=Message)

_TOOL_CHOICES = frozenset({"none", "auto", "required"})
_STREAMING = ("stream", "stream_options")
"""Fields that a method stands for: they are none of a call's own."""
_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_LARGEST_WHOLE = 2**53
"""The numbers of a Struct are floats: beyond this, not each whole number is one."""


def chat_body(request: ChatRequest, *, stream: bool) -> dict[str, Any]:
    """Returns the body of `/v1/chat/completions`."""
    body = fields_of(request)  # further fields may be anything: they come among these at the end
    for tool in body.get("tools", ()):
        tool["type"] = "function"
    for message in body.get("messages", ()):
        for call in message.get("tool_calls", ()):
            call["type"] = "function"
    choice = body.get("tool_choice", "auto")
    if choice not in _TOOL_CHOICES:
        body["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return _with_options(body, stream=stream)


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

    Raises ApiError 400 for more structure than a body of JSON may have: an empty message is two bytes, but
    takes as long as any other.
    """
    return _Reader().fields_of(message)


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
    for name in _STREAMING:
        extra.pop(name, None)
    body = extra | options | body
    return body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body


def _prompt_of(prompt: Prompt) -> str | list[int]:
    return list(prompt.tokens.ids) if prompt.HasField("tokens") else prompt.text


class _Reader:
    """Reads one message, and counts what it holds."""

    def __init__(self) -> None:
        self._fields, self._values = MAX_FIELDS, MAX_VALUES

    def fields_of(self, message: Message) -> dict[str, Any]:
        return {field.name: self._value_of(field, value) for field, value in message.ListFields()}

    def _count(self, *, fields: int = 0, values: int = 0) -> None:
        self._fields -= fields
        self._values -= values
        if self._fields < 0 or self._values < 0:
            raise too_much()

    def _value_of(self, field: FieldDescriptor, value: Any) -> Any:
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            if not field.is_repeated:
                return _checked(value, field.name)
            self._count(values=len(value))
            if field.type not in _FLOATS:
                return list(value)  # at once: half a million tokens may be in it
            return [_checked(item, field.name) for item in value]
        kind = field.message_type
        assert kind is not None, "the field is a message"
        self._count(fields=len(value) if field.is_repeated else 1)
        if kind.GetOptions().map_entry:
            return {str(key): _checked(item, field.name) for key, item in value.items()}
        if field.is_repeated:
            return [self.fields_of(item) for item in value]
        return self._struct(value) if isinstance(value, Struct) else self.fields_of(value)

    def _struct(self, struct: Struct) -> dict[str, Any]:
        self._count(fields=len(struct.fields))
        return {name: self._json(value) for name, value in struct.fields.items()}

    def _json(self, value: Value) -> Any:
        match value.WhichOneof("kind"):
            case "struct_value":
                return self._struct(value.struct_value)
            case "list_value":
                self._count(fields=1, values=len(value.list_value.values))
                return [self._json(item) for item in value.list_value.values]
            case "number_value":
                return _whole(_checked(value.number_value))
            case "string_value":
                return value.string_value
            case "bool_value":
                return value.bool_value
            case _:
                return None


def _checked(value: Any, param: str | None = None) -> Any:
    """Returns the value of a field that is no message. Raises ApiError 400 for NaN and infinity, which would
    become null in the body: not set.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid_request(
            f"{value} is no number of JSON: send a finite one.", param=param, code="invalid_json"
        )
    return value


def _whole(number: float) -> float | int:
    """Returns a number of a Struct, a whole one as such."""
    return int(number) if number.is_integer() and abs(number) <= _LARGEST_WHOLE else number


def _text_logprobs(logprobs: dict[str, Any]) -> dict[str, Any]:
    """Text completions' logprobs without nulls, which a list of messages cannot hold."""
    return logprobs | {
        "token_logprobs": ["NaN" if each is None else each for each in logprobs["token_logprobs"]],
        "top_logprobs": [{"logprobs": each or {}} for each in logprobs["top_logprobs"] or ()],
    }
