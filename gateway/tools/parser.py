"""From a model's answer to its text and its calls, piece by piece.

What is held back is what may become a part of a call: a marker's beginning with the white space before it,
and a call up to its arguments. Where the pieces are cut does not matter.

What only looks like a call is text, as the model wrote it: a marker that no object follows, an object that is
no JSON or has no name. Once its name and its arguments' beginning have come it is a call, and its arguments
are passed on as they come, whole or not: a client has to expect that of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gateway.tools.call_text import CallText
from gateway.tools.forms import CallForm
from gateway.tools.json_scanner import JsonScanner, Progress


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call, the answer's `index`th from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """What is new of the arguments of the call that began last."""

    index: int
    text: str


Event = Text | CallBegin | CallArguments


class CallParser:
    """Reads one choice's answer."""

    def __init__(self, form: CallForm, names: Collection[str]) -> None:
        """`names` are the functions that there are. Where calls have a marker, others are passed on as well,
        since a client can tell the model of its mistake.
        """
        self.calls = 0
        """Calls that have begun."""
        self._form = form
        self._call = CallText(form, names.__contains__ if form.bare else lambda name: True)
        self._buffer = ""
        self._before = ""  # taken from the buffer, and text after all should no call follow
        self._in_list = False
        self._scanner = JsonScanner()
        self._scanned = 0  # characters of the buffer that the scanner has seen
        self._events: list[Event] = []
        self._step: Callable[[], bool] = self._start if form.bare else self._text

    def feed(self, text: str) -> list[Event]:
        """Returns what has become certain with this text."""
        self._buffer += text
        while self._buffer and self._step():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Returns what was held back, when no more text comes."""
        held, self._buffer = self._before + self._buffer, ""
        # White space around calls, and what ends one, are how calls are written.
        if self._step in (self._tail, self._closing) or (self.calls and not held.strip()):
            return []
        return [Text(held)] if held else []

    # Each state takes from the buffer what is certain. True: the next state may go on with the rest.

    def _text(self) -> bool:
        """In text, which a marker ends."""
        marker = self._form.marker
        at = self._buffer.find(marker)
        if at < 0:
            self._show(self._buffer[: len(self._buffer) - _begun(marker, self._buffer)].rstrip())
            return False
        self._show(self._buffer[:at].rstrip())
        self._take_before(self._buffer.index(marker) + len(marker))
        self._step = self._opened
        return True

    def _start(self) -> bool:
        """At the beginning, or behind a call, of an answer whose calls may have no marker."""
        rest = self._buffer.lstrip()
        if self.calls and rest.startswith(";"):
            rest = rest[1:].lstrip()
        marker = self._form.marker
        if rest.startswith(marker):
            self._take_before(len(self._buffer) - len(rest) + len(marker))
            self._step = self._opened
        elif rest.startswith("{"):
            self._take_before(len(self._buffer) - len(rest))
            self._begin_object()
        elif marker.startswith(rest):
            return False
        else:
            self._step = self._rest
        return True

    def _rest(self) -> bool:
        """In text that nothing ends."""
        self._show(self._buffer)
        return False

    def _opened(self) -> bool:
        """Behind a marker, or where another item of a list of calls should be."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if self._form.listed and not self._in_list and rest.startswith("["):
            self._in_list = True
            self._take_before(len(self._buffer) - len(rest) + 1)
        elif rest.startswith("{") and self._in_list == self._form.listed:
            self._take_before(len(self._buffer) - len(rest))
            self._begin_object()
        else:
            self._no_call(0)
        return True

    def _object(self) -> bool:
        """In an object that may be a call."""
        if head := self._call.head(self._buffer):
            name, at = head
            self._begin_call(name)
            self._buffer = self._buffer[at:]
            self._scanner = JsonScanner()
            self._step = self._arguments
            return True
        if not self._call.may_begin(self._buffer):
            self._no_call(len(self._buffer))
            return True
        self._scanned, progress = self._scanner.feed(self._buffer, self._scanned)
        if progress is Progress.OPEN:
            return False
        call = self._call.whole(self._buffer[: self._scanned]) if progress is Progress.COMPLETE else None
        if call is None:
            self._no_call(self._scanned)
            return True
        self._begin_call(call[0])
        self._events.append(CallArguments(self.calls - 1, call[1]))
        self._buffer = self._buffer[self._scanned :]
        self._end_call()
        return True

    def _arguments(self) -> bool:
        """In a call's arguments."""
        end, progress = self._scanner.feed(self._buffer)
        if end:
            self._events.append(CallArguments(self.calls - 1, self._buffer[:end]))
            self._buffer = self._buffer[end:]
        if progress is Progress.COMPLETE:
            self._scanner = JsonScanner(depth=1)
            self._step = self._tail
        elif progress is Progress.BROKEN:
            self._end_call()
        return progress is not Progress.OPEN

    def _tail(self) -> bool:
        """Behind the arguments, in the call's object."""
        end, progress = self._scanner.feed(self._buffer)
        self._buffer = self._buffer[end:]
        if progress is Progress.OPEN:
            return False
        self._end_call()
        return True

    def _closing(self) -> bool:
        """Behind a call's object."""
        rest = self._buffer.lstrip()
        closing = "]" if self._form.listed else self._form.closing
        if closing.startswith(rest) and rest != closing:
            return False
        if self._form.listed and rest.startswith(","):
            self._take_before(len(self._buffer) - len(rest) + 1)
            self._step = self._opened
            return True
        if rest.startswith(closing):
            self._buffer = rest[len(closing) :]
        self._in_list = False
        self._step = self._text
        return True

    # What states do.

    def _show(self, text: str) -> None:
        """Takes a text that the buffer begins with as text."""
        if text:
            self._events.append(Text(text))
            self._buffer = self._buffer[len(text) :]

    def _take_before(self, end: int) -> None:
        self._before += self._buffer[:end]
        self._buffer = self._buffer[end:]

    def _begin_object(self) -> None:
        self._scanner, self._scanned = JsonScanner(), 0
        self._step = self._object

    def _begin_call(self, name: str) -> None:
        self._before = ""
        self._events.append(CallBegin(self.calls, name))
        self.calls += 1

    def _end_call(self) -> None:
        self._step = self._start if self._form.bare else self._closing

    def _no_call(self, end: int) -> None:
        """Has what may have been a call be text, up to `end` of the buffer."""
        self._take_before(end)
        self._events.append(Text(self._before))
        self._before = ""
        self._in_list = False
        self._step = self._rest if self._form.bare else self._text


def _begun(marker: str, text: str) -> int:
    """Returns how many characters of `marker` a text ends with, that does not hold it."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
