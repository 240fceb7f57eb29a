"""The bodies of `POST /v1/messages` and `…/count_tokens`, with Anthropic's names and rules."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.schemas.chat import MAX_MESSAGES
from gateway.schemas.generation import MAX_STOPS, AtMost, StopString, StrictModel, Unsupported, fault
from gateway.schemas.message_blocks import (
    CacheControl,
    Content,
    ContentBlock,
    TextBlock,
    TextContent,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
    text_of,
)
from gateway.schemas.tools import MAX_TOOLS, FunctionName

_LEAST_BUDGET = 1024
_NO_CHANGE = "Accepted; changes nothing."
_BLOCKS_OF: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}


class Message(StrictModel):
    """What somebody said. Messages of one role in a row are one."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Message:
        for block in () if isinstance(self.content, str) else self.content:
            if block.type not in _BLOCKS_OF[self.role]:
                reason = f"a message of the role '{self.role}' can have no '{block.type}' blocks"
                raise fault("content", reason)
        return self


def _refuse_server_tools(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        message = "Tools of the type '{kind}' are not supported by this server."
        raise PydanticCustomError("unsupported", message, {"kind": kind[:64]})
    return value


class CustomTool(StrictModel):
    """A function that the client runs."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema whose type is `object`.")
    strict: bool | None = Field(False, description="Hold the input to the schema, and refuse what cannot be.")
    cache_control: CacheControl | None = Field(None, description=_NO_CHANGE)
    eager_input_streaming: bool | None = Field(None, description=_NO_CHANGE)
    input_examples: Unsupported = None
    defer_loading: Unsupported = None
    allowed_callers: Annotated[list[Literal["direct"]] | None, AtMost(1)] = Field(
        None, description=_NO_CHANGE
    )

    @model_validator(mode="after")
    def _takes_an_object(self) -> CustomTool:
        if self.input_schema.get("type", "object") != "object":
            raise fault("input_schema", "its 'type' must be \"object\"")
        return self


class ToolChoice(StrictModel):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(None, description="With `tool`: the one to be called.")
    disable_parallel_tool_use: bool | None = Field(False, description="One call at most.")

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise fault("name", "it belongs to the type 'tool', which needs it")
        return self


class Thinking(StrictModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=_LEAST_BUDGET, description="The model is not told of it.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted`: without blocks of what was thought."
    )

    @model_validator(mode="after")
    def _has_a_budget(self) -> Thinking:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise fault("budget_tokens", "it belongs to the type 'enabled', which needs it")
        return self


class JsonOutput(StrictModel):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """What the answer is to be like."""

    format: JsonOutput | None = Field(None, description="What an answer without calls must fit.")
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(None, description=_NO_CHANGE)


class Metadata(StrictModel):
    """About the request."""

    user_id: str | None = Field(None, max_length=256)


class MessageInput(StrictModel):
    """All that a prompt is made of."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "sql", "messages": [{"role": "user", "content": "How many users?"}]}]
        }
    )

    model: str = Field(
        min_length=1, max_length=256, description="The base model, or an adapter's name.", examples=["sql"]
    )
    messages: Annotated[list[Message], AtMost(MAX_MESSAGES), Field(min_length=1)] = Field(
        description="The conversation; if its last message is the assistant's, the answer continues that."
    )
    system: TextContent | None = Field(None, description="What the model is told before the conversation.")
    tools: Annotated[
        list[Annotated[CustomTool, BeforeValidator(_refuse_server_tools)]] | None, AtMost(MAX_TOOLS)
    ] = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="`auto` by default.")
    thinking: Thinking | None = Field(None, description="Disabled by default.")
    output_config: OutputConfig | None = Field(None, description="Structured output.")
    cache_control: CacheControl | None = Field(None, description=_NO_CHANGE)
    container: Unsupported = None
    context_management: Unsupported = None
    mcp_servers: Unsupported = None

    @cached_property
    def turns(self) -> list[tuple[str, list[ContentBlock]]]:
        """The conversation by who speaks: messages of one role in a row are joined."""
        turns: list[tuple[str, list[ContentBlock]]] = []
        for message in self.messages:
            blocks = blocks_of(message.content)
            if turns and turns[-1][0] == message.role:
                turns[-1][1].extend(blocks)
            else:
                turns.append((message.role, list(blocks)))
        return turns

    @cached_property
    def prefill(self) -> str | None:
        """The beginning of the answer, where the assistant spoke last."""
        role, blocks = self.turns[-1]
        texts = [block for block in blocks if isinstance(block, TextBlock)]
        return text_of(texts) if role == "assistant" else None

    @model_validator(mode="after")
    def _conversation_is_whole(self) -> MessageInput:
        for index, message in enumerate(self.messages):
            is_last = index == len(self.messages) - 1
            if not message.content and not (is_last and message.role == "assistant"):
                raise fault("messages", "only a last message of the assistant may be without content")
        turns = self.turns
        for (_, blocks), (_, following) in zip(turns, [*turns[1:], ("user", [])], strict=True):
            called = [block.id for block in blocks if isinstance(block, ToolUseBlock)]
            answered = {block.tool_use_id for block in following if isinstance(block, ToolResultBlock)}
            if missing := [call for call in called if call not in answered]:
                raise fault("messages", f"'tool_use' without a 'tool_result' right after it: {missing[0]}")
            if unknown := answered - set(called):
                raise fault(
                    "messages", f"'tool_result' without its 'tool_use' right before it: {min(unknown)}"
                )
        first_role, first = turns[0]
        if first_role == "user" and any(isinstance(block, ToolResultBlock) for block in first):
            raise fault("messages", "the first message can have no 'tool_result'")
        if (prefill := self.prefill) and prefill != prefill.rstrip():
            raise fault("messages", "a last message of the assistant may not end with white space")
        return self

    @model_validator(mode="after")
    def _tools_agree(self) -> MessageInput:
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise fault("tools", f"'{max(names, key=names.count)}' is there more than once")
        choice = self.tool_choice
        if choice and choice.type in ("any", "tool") and not names:
            raise fault("tool_choice", "it needs 'tools'")
        if choice and choice.name is not None and choice.name not in names:
            raise fault("tool_choice", f"'{choice.name}' is not among the 'tools'")
        return self


class MessagesRequest(MessageInput):
    """A conversation to be continued by one message."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "sql",
                    "max_tokens": 32,
                    "system": "Answer with one SQL statement.",
                    "messages": [{"role": "user", "content": "How many users are there?"}],
                    "temperature": 0,
                },
                {
                    "model": "sql@1",
                    "max_tokens": 16,
                    "messages": [
                        {"role": "user", "content": [{"type": "text", "text": "Count to ten."}]},
                        {"role": "assistant", "content": "One, two,"},
                    ],
                    "stop_sequences": ["ten"],
                    "stream": True,
                },
            ]
        }
    )

    max_tokens: int = Field(ge=1, description="Most tokens of the answer, those that are thought included.")
    stream: bool | None = Field(False, description="Answer with server-sent events.")
    stop_sequences: Annotated[list[StopString] | None, AtMost(MAX_STOPS)] = Field(
        None, description="The answer ends before the first of these."
    )
    temperature: float | None = Field(None, ge=0, le=1, description="0: greedy; 1 by default.")
    top_p: float | None = Field(
        None, ge=0, le=1, description="The most likely tokens, up to this probability."
    )
    top_k: int | None = Field(None, ge=0, lt=2**32, description="The most likely tokens, this many; 0: off.")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="Not Anthropic's: the same seed, prompt and model give the same answer.",
    )
    metadata: Metadata | None = Field(
        None, description="While a canary runs, the same `user_id` meets the same version."
    )
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=_NO_CHANGE)

    @model_validator(mode="after")
    def _budget_fits(self) -> MessagesRequest:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise fault("max_tokens", "it must be greater than 'thinking.budget_tokens'")
        return self
