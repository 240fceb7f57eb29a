"""Anthropic's `message`, whole and as the events of a stream."""

from __future__ import annotations

import secrets
from typing import Any

from pydantic_core import from_json

from gateway.api.answer import finish_reason_of
from gateway.generation import LENGTH, Piece, Usage
from gateway.messages.blocks import TEXT, THINKING, TOOL_USE, BlockEvent, BlockReader, BlockStart
from gateway.resolve import ResolvedModel
from gateway.sse import named_event
from gateway.tools.plan import ToolPlan

_DELTAS = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}
"""By the kind of a block: what an event calls its news, and the field that has it."""
_NO_STOP: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}


class MessageFormat:
    """See AnswerFormat. A message is the one choice that there is, and its stream always ends with usage."""

    def __init__(self, model: ResolvedModel, plan: ToolPlan, *, include_thinking: bool) -> None:
        """`include_thinking`: what is thought is a block, too."""
        self._model = model.served_name
        self._blocks = BlockReader(plan.parser(), include_thinking=include_thinking)
        self._index = -1  # of the block that began last; in a stream, it is open
        self._kind = ""
        self._stop = _NO_STOP

    def opening(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        start = {"type": "message_start", "message": self._message([], _NO_STOP, usage)}
        return named_event(start) + named_event({"type": "ping"})

    def chunk(self, piece: Piece) -> bytes:
        """See AnswerFormat: the reason for the end goes with the usage."""
        data = b"".join(map(self._block_event, self._blocks.read(piece)))
        if piece.finish_reason is not None:
            self._stop = self._stop_of(piece.finish_reason, piece.stop)
        return data

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        end = {"type": "message_delta", "delta": self._stop, "usage": _usage(usage)}
        return self._block_stop() + named_event(end) + named_event({"type": "message_stop"})

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        """See AnswerFormat."""
        (own,) = pieces
        text, reasoning = "".join(piece.text for piece in own), "".join(piece.reasoning for piece in own)
        reason, stop = finish_reason_of(own), own[-1].stop if own else None
        content: list[dict[str, Any]] = []
        texts: list[str] = []
        for event in self._blocks.read(Piece(0, text, (), reason, reasoning)):
            if isinstance(event, BlockStart):
                content.append(event.block)
                texts.append("")
            else:
                texts[-1] += event.text
        for block, written in zip(content, texts, strict=True):
            if block["type"] == TOOL_USE:
                block["input"] = _input_of(written)
            else:
                block[_DELTAS[block["type"]][1]] = written
        return self._message(content, self._stop_of(reason, stop), usage)

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any], usage: Usage) -> dict[str, Any]:
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        return {**head, "model": self._model, "content": content, **stop, "usage": _usage(usage)}

    def _block_event(self, event: BlockEvent) -> bytes:
        if isinstance(event, BlockStart):
            stop = self._block_stop()
            self._index += 1
            self._kind = event.block["type"]
            start = {"type": "content_block_start", "index": self._index, "content_block": event.block}
            return stop + named_event(start)
        kind, field = _DELTAS[self._kind]
        delta = {"type": kind, field: event.text}
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _block_stop(self) -> bytes:
        if self._index < 0:
            return b""
        return named_event({"type": "content_block_stop", "index": self._index})

    def _stop_of(self, reason: str | None, stop: str | None) -> dict[str, Any]:
        """Returns Anthropic's words for how an answer ended."""
        if reason == LENGTH:
            name = "max_tokens"
        elif stop is not None:
            name = "stop_sequence"
        else:
            name = "tool_use" if self._blocks.has_calls else "end_turn"
        return {"stop_reason": name, "stop_sequence": stop}


def _usage(usage: Usage) -> dict[str, Any]:
    """Returns Anthropic's usage object, whose input tokens are those that were not in the cache."""
    found: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        found["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return found


def _input_of(written: str) -> dict[str, Any]:
    """Returns a call's arguments, as far as they came: an answer may be cut off within them."""
    try:
        found = from_json(written, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
