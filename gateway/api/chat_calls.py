"""Tool calls in OpenAI's chat answers."""

from __future__ import annotations

import secrets
from typing import Any

from gateway.generation import STOP
from gateway.tools.parser import CallArguments, CallBegin, CallParser, Event, Text

TOOL_CALLS = "tool_calls"


class CallReader:
    """Makes deltas, or a message, of one choice's text."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    def of(self, text: str, finish_reason: str | None) -> list[dict[str, Any]]:
        """Returns the deltas for what is new; with a reason, the last ones."""
        return [_delta(event) for event in self._events(text, finish_reason)]

    def reason_of(self, finish_reason: str | None) -> str | None:
        """Returns what the client is told: one that came to its end with calls waits for their results."""
        return TOOL_CALLS if finish_reason == STOP and self._parser.calls else finish_reason

    def whole(self, text: str, finish_reason: str | None) -> tuple[dict[str, Any], str | None]:
        """Returns the message for all of a choice's text, and the reason to tell."""
        content = ""
        calls: list[dict[str, Any]] = []
        for event in self._events(text, finish_reason):
            match event:
                case Text():
                    content += event.text
                case CallBegin():
                    calls.append(_call(event))
                case CallArguments():
                    calls[-1]["function"]["arguments"] += event.text
        message = {"role": "assistant", "content": content or None, "refusal": None}
        return message | {TOOL_CALLS: calls} if calls else message, self.reason_of(finish_reason)

    def _events(self, text: str, finish_reason: str | None) -> list[Event]:
        events = self._parser.feed(text)
        return events if finish_reason is None else events + self._parser.finish()


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case Text():
            return {"content": event.text}
        case CallBegin():
            return {TOOL_CALLS: [{"index": event.index, **_call(event)}]}
        case CallArguments():
            return {TOOL_CALLS: [{"index": event.index, "function": {"arguments": event.text}}]}


def _call(event: CallBegin) -> dict[str, Any]:
    """Returns a call without arguments."""
    function = {"name": event.name, "arguments": ""}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
