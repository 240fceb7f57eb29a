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
from gateway.schemas.tools import NamedTool, ToolCalls, ToolChoice, Tools
from gateway.tools.use import Calls, ToolUse

MAX_MESSAGES = 4096
MAX_PARTS = 1024
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
_NO_CHANGE = "Accepted; changes nothing."


class TextPart(StrictModel):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, AtMost(MAX_PARTS)] = Field(
        None, description="May be null, or absent, beside `tool_calls`."
    )
    name: str | None = None
    tool_calls: ToolCalls | None = Field(None, description="What the assistant has called.")
    tool_call_id: str | None = Field(
        None, min_length=1, max_length=256, description="The call whose result a tool's message is."
    )
    reasoning_content: str | None = Field(
        None, description="What the assistant thought, for templates that show it."
    )
    reasoning: str | None = Field(None, description="Another name for `reasoning_content`.")
    parsed: Any = Field(None, description="Left there by clients that parse; changes nothing.")
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise fault("tool_calls", "only an assistant's message may have it")
        if self.thought and self.role != "assistant":
            raise fault("reasoning_content", "only an assistant's message may have it")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            reason = (
                "a tool's message needs it" if self.role == "tool" else "only a tool's message may have it"
            )
            raise fault("tool_call_id", reason)
        if self.content is None and not self.tool_calls:
            raise fault("content", "it may be null only in an assistant's message with 'tool_calls'")
        return self

    @property
    def text(self) -> str:
        """The content, parts joined by line ends; "" for none."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    @property
    def thought(self) -> str | None:
        """What the assistant thought, by either name."""
        return self.reasoning_content or self.reasoning

    def for_template(self) -> dict[str, Any]:
        """Returns what the chat template sees. A developer is the system; arguments are as they came."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.name is not None:
            message["name"] = self.name
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


Messages = Annotated[list[ChatMessage], AtMost(MAX_MESSAGES), Field(min_length=1)]


class Conversation(StrictModel):
    """Messages, and how the model's chat template makes a prompt of them."""

    messages: Messages
    tools: Tools | None = Field(None, description="Functions that the model may call.")
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
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise fault("tools", f"'{max(names, key=names.count)}' is there more than once")
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
                {
                    "model": "sql",
                    "messages": [
                        {"role": "user", "content": "Rain?"},
                        {"role": "assistant", "tool_calls": [_CALL]},
                        {"role": "tool", "tool_call_id": "call_1", "content": "no"},
                    ],
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
    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether tools are called: `auto` by default, `none`, `required`, or one by its name.",
    )
    parallel_tool_calls: bool | None = Field(True, description="Whether an answer may have several calls.")
    include_reasoning: bool = Field(True, description="Give what the model thought before its answer.")
    # Accepted, since they do not change the answer.
    store: bool | None = Field(None, description=_NO_CHANGE)
    service_tier: Literal["auto", "default"] | None = Field(None, description=_NO_CHANGE)
    modalities: Annotated[list[Literal["text"]] | None, AtMost(1)] = Field(None, description=_NO_CHANGE)
    safety_identifier: str | None = Field(None, description=_NO_CHANGE)
    prompt_cache_key: str | None = Field(None, description=_NO_CHANGE)
    # Known, and refused when used.
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
        if self.tools and self.use_beam_search:
            raise fault("tools", "it cannot be used with 'use_beam_search'")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if (named or self.tool_choice == "required") and not self.tools:
            raise fault("tool_choice", "it needs 'tools'")
        if named and all(tool.function.name != named for tool in self.tools or ()):
            raise fault("tool_choice", f"'{named}' is not among the 'tools'")
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        """Which tools there are, and how they may be used; None without any."""
        if not self.tools:
            return None
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return ToolUse(
            [tool.to_function() for tool in self.tools],
            Calls.REQUIRED if named else Calls(self.tool_choice or "auto"),
            named,
            parallel=self.parallel_tool_calls is not False,
        )

    @property
    def continued_text(self) -> str | None:
        """The text of the message that is to be continued; None where there is none."""
        return self.messages[-1].text if self.continue_final_message else None

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
