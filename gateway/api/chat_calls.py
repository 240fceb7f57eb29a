"""Tool calls in OpenAI's chat answers: deltas of a stream, and the message that they add up to."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from gateway.generation import STOP, Piece
from gateway.tools.parser import CallArguments, CallBegin, CallParser, Event, Text

TOOL_CALLS = "tool_calls"


class CallDeltas:
    """Turns the pieces of one choice into deltas."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    def of(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the deltas for what is new."""
        events = self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.finish()
        return [_delta(event) for event in events]

    def reason_of(self, piece: Piece) -> str | None:
        """Returns the finish reason: an answer that came to its end with calls waits for their results."""
        return TOOL_CALLS if piece.finish_reason == STOP and self._parser.calls else piece.finish_reason


def message_of(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a choice's deltas add up to."""
    content = "".join(delta.get("content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get(TOOL_CALLS, ())):
        if "id" in part:
            calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    message = {"role": "assistant", "content": content or None, "refusal": None}
    return message | {TOOL_CALLS: calls} if calls else message


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case Text():
            return {"content": event.text}
        case CallBegin():
            function = {"name": event.name, "arguments": ""}
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            return {TOOL_CALLS: [{"index": event.index, **call}]}
        case CallArguments():
            return {TOOL_CALLS: [{"index": event.index, "function": {"arguments": event.text}}]}
