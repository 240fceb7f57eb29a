"""A conversation, and the body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from gateway.schemas.generation import (
    MAX_TOP_LOGPROBS,
    AtMost,
    StrictModel,
    Unsupported,
    fault,
)
from gateway.schemas.structure import StructureFields

MAX_MESSAGES = 4096
MAX_PARTS = 1024
_NO_CHANGE = "Accepted; changes nothing."


class TextPart(StrictModel):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], AtMost(MAX_PARTS)]
    name: str | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """Returns what the chat template sees. Parts are joined by line ends; a developer is the system."""
        text = (
            self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        )
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else message | {"name": self.name}


Messages = Annotated[list[ChatMessage], AtMost(MAX_MESSAGES), Field(min_length=1)]


class Conversation(StrictModel):
    """Messages, and how the model's chat template makes a prompt of them."""

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="As `apply_chat_template` has it.")
    continue_final_message: bool = Field(
        False, description="Continue the last message, not the conversation."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template.")

    @model_validator(mode="after")
    def _template_options_agree(self) -> Conversation:
        if self.continue_final_message and self.add_generation_prompt:
            raise fault("continue_final_message", "it excludes 'add_generation_prompt': true")
        reserved = {"messages", "tools", "documents", "add_generation_prompt"} & set(
            self.chat_template_kwargs or {}
        )
        if reserved:
            raise fault("chat_template_kwargs", f"'{sorted(reserved)[0]}' cannot be set here")
        return self


class ChatRequest(Conversation, StructureFields):
    """A conversation to be continued by one message."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "sql",
                    "messages": [
                        {"role": "system", "content": "Answer with one SQL statement."},
                        {"role": "user", "content": "How many users are there?"},
                    ],
                    "max_completion_tokens": 32,
                    "temperature": 0,
                },
                {
                    "model": "sql@1",
                    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "stop": ["\n\n"],
                    "seed": 7,
                    "max_tokens": 16,
                },
            ]
        }
    )

    max_completion_tokens: int | None = Field(None, ge=1, description="Wins over `max_tokens`.")
    logprobs: bool | None = Field(False, description="Give the tokens with their logprobs.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Alternatives a token; needs `logprobs`."
    )
    # Accepted, since they do not change the answer.
    store: bool | None = Field(None, description=_NO_CHANGE)
    service_tier: Literal["auto", "default"] | None = Field(None, description=_NO_CHANGE)
    modalities: Annotated[list[Literal["text"]] | None, AtMost(1)] = Field(None, description=_NO_CHANGE)
    parallel_tool_calls: bool | None = Field(None, description=_NO_CHANGE)
    tool_choice: Literal["none", "auto"] | None = Field(None, description=_NO_CHANGE)
    safety_identifier: str | None = Field(None, description=_NO_CHANGE)
    prompt_cache_key: str | None = Field(None, description=_NO_CHANGE)
    # Known, and refused when used.
    tools: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    best_of: Unsupported = None

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise fault("top_logprobs", "it needs 'logprobs': true")
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens per choice that the client wants; None: what the model's length leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def open_ended(self) -> bool:
        """See GenerationFields."""
        return self.token_limit is None

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token; None when no logprobs are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None
