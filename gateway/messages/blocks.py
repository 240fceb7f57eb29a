"""From pieces of an answer to Anthropic's content blocks."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from gateway.generation import Piece
from gateway.tools.parser import CallArguments, CallBegin, CallParser, Event, Text

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A block begins, and the one before it has ended. `block` has nothing yet of what comes by and by."""

    block: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BlockText:
    """What is new of the block that began last."""

    text: str


BlockEvent = BlockStart | BlockText


class BlockReader:
    """Makes blocks of one answer. Where its pieces are cut does not matter."""

    def __init__(self, parser: CallParser | None, *, include_thinking: bool) -> None:
        """`parser` None: there are no calls. `include_thinking`: what is thought is a block, too."""
        self._parser = parser
        self._include_thinking = include_thinking
        self._kind: str | None = None
        self._events: list[BlockEvent] = []

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._parser is not None and self._parser.calls > 0

    def read(self, piece: Piece) -> list[BlockEvent]:
        """Returns what is new; with a piece that has a finish reason, the last of it."""
        if piece.reasoning and self._include_thinking:
            self._write(THINKING, piece.reasoning, {"thinking": "", "signature": ""})
        for event in self._read_calls(piece):
            match event:
                case Text():
                    self._write(TEXT, event.text, {"text": ""})
                case CallBegin():
                    call = {"id": f"toolu_{secrets.token_hex(12)}", "name": event.name, "input": {}}
                    self._begin(TOOL_USE, call)
                case CallArguments():
                    self._events.append(BlockText(event.text))
        events, self._events = self._events, []
        return events

    def _read_calls(self, piece: Piece) -> list[Event]:
        if self._parser is None:
            return [Text(piece.text)] if piece.text else []
        events = self._parser.feed(piece.text)
        return events if piece.finish_reason is None else events + self._parser.finish()

    def _write(self, kind: str, text: str, empty: dict[str, Any]) -> None:
        """Adds to the block that is open, if it is of that kind, else to a new one."""
        if self._kind != kind:
            self._begin(kind, empty)
        self._events.append(BlockText(text))

    def _begin(self, kind: str, empty: dict[str, Any]) -> None:
        self._kind = kind
        self._events.append(BlockStart({"type": kind, **empty}))
