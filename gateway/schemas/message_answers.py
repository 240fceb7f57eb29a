"""What `/v1/messages` answers, as the OpenAPI description has it. See gateway/schemas/answers.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gateway.schemas.answers import ServedModel

StopReason = Annotated[
    Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None,
    Field(description="Null while the message goes on."),
]
BlockIndex = Annotated[int, Field(ge=0, description="Which of the message's blocks.")]


class MessagesError(TypedDict):
    """What went wrong, as Anthropic says it."""

    type: Annotated[str, Field(examples=["invalid_request_error"])]
    message: Annotated[str, Field(description="For people: the fault, and the mend.")]


class MessagesErrorBody(TypedDict):
    """The body of every error, and the data of a stream's error event."""

    type: Literal["error"]
    error: MessagesError
    request_id: Annotated[str, Field(examples=["req_5f0c6a1be2d34f7a9c8b7d6e"])]


class AnsweredText(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str


class AnsweredThinking(TypedDict):
    """What the model thought before."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, Field(description="Empty: nothing here is signed.")]


class AnsweredToolUse(TypedDict):
    """A call that the model asks for."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(examples=["toolu_5f0c6a1be2d34f7a9c8b7d6e"])]
    name: str
    input: dict[str, Any]


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse


class OutputTokensDetails(TypedDict):
    """Of the tokens of an answer."""

    thinking_tokens: Annotated[int, Field(ge=0, description="Those that were thought, marks included.")]


class MessageUsage(TypedDict):
    """Tokens of a request."""

    input_tokens: Annotated[int, Field(ge=0, description="Of the prompt, without those from the cache.")]
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Annotated[int, Field(ge=0, description="Those that the prefix cache saved.")]
    output_tokens: Annotated[int, Field(ge=0)]
    output_tokens_details: NotRequired[OutputTokensDetails]


class MessageAnswer(TypedDict):
    """A message that continues the conversation."""

    id: Annotated[str, Field(examples=["msg_5f0c6a1be2d34f7a9c8b7d6e"])]
    type: Literal["message"]
    role: Literal["assistant"]
    model: ServedModel
    content: list[AnsweredBlock]
    stop_reason: StopReason
    stop_sequence: Annotated[str | None, Field(description="The one that has ended the message.")]
    usage: MessageUsage


class MessageStart(TypedDict):
    """The first event: a message without content."""

    type: Literal["message_start"]
    message: MessageAnswer


class Ping(TypedDict):
    """Says nothing."""

    type: Literal["ping"]


class ContentBlockStart(TypedDict):
    """A block begins, empty."""

    type: Literal["content_block_start"]
    index: BlockIndex
    content_block: AnsweredBlock


class TextDelta(TypedDict):
    """What is new of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """What is new of what is thought."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(TypedDict):
    """What is new of a call's input, as JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(TypedDict):
    """What is new of a block."""

    type: Literal["content_block_delta"]
    index: BlockIndex
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(TypedDict):
    """A block is whole."""

    type: Literal["content_block_stop"]
    index: BlockIndex


class MessageEnd(TypedDict):
    """Why a message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """How the message ended, and what it cost in all."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


MessageEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
"""The data of one event of a stream, whose name is its `type`."""


class TokenCount(TypedDict):
    """What a conversation is to the model."""

    input_tokens: Annotated[int, Field(ge=0, description="With those that may come from the cache.")]
