"""The bodies of `POST /tokenize` and `POST /detokenize`, and what they answer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from gateway.schemas.chat import Conversation, Messages
from gateway.schemas.generation import AtMost, StrictModel, TokenId, fault
from gateway.schemas.tools import Tools

_MOST_TOKENS = 1 << 20
ModelName = Annotated[
    str, Field(min_length=1, max_length=256, description="Whose tokenizer; an adapter may have its own.")
]


class Tokenize(StrictModel):
    """A text as `/v1/completions` takes it, or a conversation as `/v1/chat/completions` does."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "sql", "prompt": "SELECT 1"},
                {"model": "sql", "messages": [{"role": "user", "content": "Hi"}]},
            ]
        }
    )

    model: ModelName
    prompt: str | None = Field(None, description="A text.")
    add_special_tokens: bool | None = Field(
        None, description="Add what the tokenizer puts around a `prompt`, such as a first token; it does."
    )
    messages: Messages | None = Field(None, description="A conversation.")
    tools: Tools | None = Field(None, description="As for a chat.")
    add_generation_prompt: bool | None = Field(None, description="As for a chat.")
    continue_final_message: bool = Field(False, description="As for a chat.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="As for a chat.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Tokenize:
        if self.messages is None and self.prompt is None:
            raise fault("prompt", "it or 'messages' is required")
        if self.messages is not None and self.prompt is not None:
            raise fault("messages", "it excludes 'prompt'")
        if self.messages is not None and self.add_special_tokens is not None:
            raise fault("add_special_tokens", "it needs 'prompt'")
        if self.messages is None and self.tools is not None:
            raise fault("tools", "it needs 'messages'")
        return self

    @property
    def conversation(self) -> Conversation | None:
        """The conversation, unless it is a text."""
        if self.messages is None:
            return None
        return Conversation(
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class Detokenize(StrictModel):
    """Tokens to be read as text."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "sql", "tokens": [1, 2, 3]}]})

    model: ModelName
    tokens: Annotated[list[TokenId], Field(fail_fast=True, description="Token ids."), AtMost(_MOST_TOKENS)]


class TokenList(TypedDict):
    """What a text or a conversation is to the model."""

    tokens: list[int]
    count: Annotated[int, Field(ge=0)]
    max_model_len: Annotated[int, Field(description="Most tokens, prompt and answer together.")]


class DetokenizedText(TypedDict):
    """What tokens mean."""

    prompt: Annotated[
        str, Field(description="Special tokens by their names; bytes that are no whole character as U+FFFD.")
    ]
