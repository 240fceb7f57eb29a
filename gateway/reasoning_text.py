"""Tells what a model thinks from what it says, in a text that comes in pieces: `<think>` … `</think>` first.

White space around and inside of the marks is how they are written, and belongs to neither part. Where the
pieces are cut does not matter.
"""

from __future__ import annotations

from collections.abc import Callable

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Reads one choice's text: what is thought, if it begins with that, and the rest."""

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the text begins within the thought."""
        self._opened = opened
        self._buffer = ""
        self._read = 0
        self._begun = False  # whether some of the thought was returned
        self._step: Callable[[], tuple[str, str]] = self._start

    @property
    def consumed(self) -> int:
        """Characters that were returned or dropped, and are not held back."""
        return self._read - len(self._buffer)

    @property
    def inside(self) -> bool:
        """Whether the text is within the thought."""
        return self._step == self._thought or (self._opened and self._step == self._start)

    def feed(self, text: str) -> tuple[str, str]:
        """Returns what has become certain with this text: of the thought, and of the rest."""
        if self._step == self._content:
            self._read += len(text)
            return "", text
        self._buffer += text
        self._read += len(text)
        reasoning = content = ""
        step = None
        while self._buffer and step != self._step:
            step = self._step
            thought, rest = step()
            reasoning += thought
            content += rest
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """Returns what was held back, when no more text comes."""
        held, self._buffer = self._buffer, ""
        if not self.inside:
            return "", held if self._step == self._start else ""
        held = held.rstrip()
        return held if self._begun else held.lstrip(), ""

    # Each state takes from the buffer what is certain. When another state follows, that goes on.

    def _start(self) -> tuple[str, str]:
        """Before anything but white space."""
        begun = self._buffer.lstrip()
        if begun.startswith(OPEN):
            self._buffer = begun[len(OPEN) :]
            self._step = self._thought
        elif not OPEN.startswith(begun):
            self._step = self._thought if self._opened else self._content
        return "", ""

    def _thought(self) -> tuple[str, str]:
        if not self._begun:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(CLOSE)
        if at >= 0:
            thought = self._buffer[:at].rstrip()
            self._buffer = self._buffer[at + len(CLOSE) :]
            self._step = self._after
        else:
            thought = self._buffer[: len(self._buffer) - _begun(self._buffer)].rstrip()
            self._buffer = self._buffer[len(thought) :]
        self._begun = self._begun or bool(thought)
        return thought, ""

    def _after(self) -> tuple[str, str]:
        """Behind the closing mark, in white space."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._content
        return "", ""

    def _content(self) -> tuple[str, str]:
        content, self._buffer = self._buffer, ""
        return "", content


def _begun(text: str) -> int:
    """Returns how many characters of the closing mark a text ends with."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
