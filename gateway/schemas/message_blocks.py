"""Anthropic's content blocks, as requests have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from gateway.schemas.generation import AtMost, StrictModel, Unsupported

MAX_BLOCKS = 1024

_ID = Annotated[str, Field(min_length=1, max_length=256)]
_SIGNATURE = "Changes nothing: nothing here is signed."


class CacheControl(StrictModel):
    """Where Anthropic's cache is to end. Here, all that was computed is cached anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(StrictModel):
    """What all blocks may have."""

    cache_control: CacheControl | None = Field(None, description="Changes nothing.")


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Unsupported = None


class ToolUseBlock(Block):
    """A call that the assistant has made."""

    type: Literal["tool_use"]
    id: _ID
    name: _ID
    input: dict[str, Any]
    caller: Any = Field(None, description="Left there by clients; changes nothing.")


class ToolResultBlock(Block):
    """What has come of a call."""

    type: Literal["tool_result"]
    tool_use_id: _ID
    content: TextContent | None = Field(None, description="A string, or blocks of text.")
    is_error: bool | None = Field(False, description="Has the result begin with `Error: `.")

    @property
    def result(self) -> str:
        """What the template sees."""
        found = text_of(self.content or "")
        return f"Error: {found}" if self.is_error else found


class ThinkingBlock(StrictModel):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description=_SIGNATURE)


class RedactedThinkingBlock(StrictModel):
    """What the assistant thought, unreadable: it is left out."""

    type: Literal["redacted_thinking"]
    data: str


_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _refuse_others(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _KINDS:
        message = "Blocks of the type '{kind}' are not supported by this server."
        raise PydanticCustomError("unsupported", message, {"kind": kind[:64]})
    return value


def _tag_of(value: Any) -> str:
    """The tags are named as pydantic names members of unions, which errors leave out of a field's path."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"dict[{kind if kind in _KINDS else _KINDS[0]}]"


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("dict[text]")]
    | Annotated[ToolUseBlock, Tag("dict[tool_use]")]
    | Annotated[ToolResultBlock, Tag("dict[tool_result]")]
    | Annotated[ThinkingBlock, Tag("dict[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("dict[redacted_thinking]")],
    Discriminator(_tag_of),
]
OnlyText = Annotated[TextBlock, BeforeValidator(_refuse_others)]
TextContent = Annotated[str | list[OnlyText], AtMost(MAX_BLOCKS)]
"""A text, or blocks of it."""
Content = Annotated[str | list[Annotated[ContentBlock, BeforeValidator(_refuse_others)]], AtMost(MAX_BLOCKS)]
"""What a message says."""


def text_of(content: str | Sequence[TextBlock]) -> str:
    """Returns a text whose blocks are joined by line ends, as a chat's parts are."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def blocks_of(content: str | Sequence[ContentBlock]) -> Sequence[ContentBlock]:
    """Returns a message's blocks, a string as one of text; none for an empty string."""
    if not isinstance(content, str):
        return content
    return [TextBlock.model_validate({"type": "text", "text": content})] if content else []
