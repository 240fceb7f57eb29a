"""What inference, `/v1/models` and the health routes answer, as the OpenAPI description has it.

Answers are built as plain objects, and not checked against these types as they go out; tests do that.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

FinishReason = Annotated[
    Literal["stop", "length"] | None,
    Field(description="`stop`: an end token or a stop string; `length`: the limit; null while it goes on."),
]
ChatFinishReason = Annotated[
    Literal["stop", "length", "tool_calls"] | None,
    Field(
        description="`stop`: an end token or a stop string; `tool_calls`: the same, where there are calls; "
        "`length`: the limit; null while it goes on."
    ),
]
Created = Annotated[int, Field(description="Unix time in seconds.")]
ServedModel = Annotated[
    str, Field(description="What answered: the base model, or `name@version`.", examples=["sql@3"])
]


class Error(TypedDict):
    """What went wrong, as OpenAI says it."""

    message: Annotated[str, Field(description="For people: the fault, and the mend.")]
    type: Annotated[str, Field(examples=["invalid_request_error"])]
    param: Annotated[str | None, Field(description="The field at fault.", examples=["temperature"])]
    code: Annotated[str | None, Field(description="For programs.", examples=["invalid_value"])]


class ErrorBody(TypedDict):
    """The body of every error, and the data of a stream's error event."""

    error: Error


class PromptTokensDetails(TypedDict):
    """Of a prompt's tokens."""

    cached_tokens: Annotated[int, Field(ge=0, description="Those that the prefix cache saved.")]


class CompletionTokensDetails(TypedDict):
    """Of the tokens of an answer."""

    reasoning_tokens: Annotated[int, Field(ge=0, description="Those that were thought, marks included.")]


class Usage(TypedDict):
    """Tokens of a request, over all its choices."""

    prompt_tokens: Annotated[int, Field(ge=0)]
    completion_tokens: Annotated[int, Field(ge=0)]
    total_tokens: Annotated[int, Field(ge=0)]
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class TokenLogprob(TypedDict):
    """A token and its logarithmic probability; -9999 for what cannot happen."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer, with its alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Logprobs of a chat answer's tokens."""

    content: list[ChosenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """What is to be called, and with what."""

    name: str
    arguments: Annotated[str, Field(description="JSON, as the model wrote it.")]


class ToolCall(TypedDict):
    """A call that the model asks for."""

    id: Annotated[str, Field(examples=["call_5f0c6a1be2d34f7a9c8b7d6e"])]
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The message that continues the conversation."""

    role: Literal["assistant"]
    content: Annotated[str | None, Field(description="Null where there is none, with `tools`.")]
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[Annotated[str, Field(description="What the model thought before.")]]
    reasoning: NotRequired[Annotated[str, Field(description="The same.")]]


class ChatChoice(TypedDict):
    """One of the `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(TypedDict):
    """A whole answer to a conversation."""

    id: Annotated[str, Field(examples=["chatcmpl-5f0c6a1be2d34f7a9c8b7d6e"])]
    object: Literal["chat.completion"]
    created: Created
    model: ServedModel
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CalledFunctionDelta(TypedDict):
    """A call's name, once, or what is new of its arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """What is new of a call: the first has everything but arguments."""

    index: Annotated[int, Field(ge=0, description="Which of the message's calls.")]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class ChatDelta(TypedDict):
    """What is new of a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    tool_calls: NotRequired[list[ToolCallDelta]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletionChunk(TypedDict):
    """The data of one event of a streamed answer. After the last comes `data: [DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Created
    model: ServedModel
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class TextLogprobs(TypedDict):
    """Logprobs of a text completion's tokens, item by item."""

    tokens: list[str]
    token_logprobs: Annotated[
        list[float | None], Field(description="Null for the first of a prompt, with `echo`.")
    ]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    """One answer, whole or what is new of it; choice i belongs to prompt i // n."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class TextCompletionChunk(TypedDict):
    """The data of one event of a streamed answer. After the last comes `data: [DONE]`."""

    id: Annotated[str, Field(examples=["cmpl-5f0c6a1be2d34f7a9c8b7d6e"])]
    object: Literal["text_completion"]
    created: Created
    model: ServedModel
    system_fingerprint: str
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


class TextCompletion(TypedDict):
    """Whole answers to one or more prompts."""

    id: Annotated[str, Field(examples=["cmpl-5f0c6a1be2d34f7a9c8b7d6e"])]
    object: Literal["text_completion"]
    created: Created
    model: ServedModel
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class Model(TypedDict):
    """What may be named as `model`: the base, or an adapter on it."""

    id: Annotated[str, Field(examples=["sql"])]
    object: Literal["model"]
    created: Created
    owned_by: Annotated[str, Field(description="A tenant's id, or `loraplex` for the base model.")]
    root: Annotated[str, Field(description="The version that the name means.", examples=["sql@3"])]
    parent: Annotated[str | None, Field(description="An adapter's base model.")]
    max_model_len: NotRequired[Annotated[int, Field(description="Most tokens, prompt and answer together.")]]


class ModelList(TypedDict):
    """All that the caller may name as `model`."""

    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    """The process lives."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """Whether requests can be served, and what is missing."""

    status: Literal["ready", "degraded", "not ready"]
    engines: Annotated[int, Field(ge=0, description="Engines that take requests.")]
    missing: list[str]
