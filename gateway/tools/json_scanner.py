"""Finds the end of an object of JSON in a text that comes in pieces."""

from __future__ import annotations

import re
from enum import Enum

# Brackets and quotes, and what JSON has nowhere outside of strings.
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w:,.+\-]', re.ASCII)
_INSIDE = re.compile(r'["\\]')


class Progress(Enum):
    """How far an object has come."""

    OPEN = "open"
    COMPLETE = "complete"
    BROKEN = "broken"


class JsonScanner:
    """Counts brackets outside of strings; what is between them is not looked at closely."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: brackets that are open already."""
        self._depth = depth
        self._inside = self._escaped = False

    def feed(self, text: str, start: int = 0) -> tuple[int, Progress]:
        """Reads `text` from `start` on. Returns where it stopped: behind the object; at a character that no
        JSON has there; or at the text's end. Nothing may be fed after the first two.
        """
        at = start
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE if self._inside else _OUTSIDE).search(text, at)
            if found is None:
                break
            at = found.end()
            match found.group():
                case '"':
                    self._inside = not self._inside
                case "\\" if self._inside:
                    self._escaped = True
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if self._depth <= 0:
                        return at, Progress.COMPLETE
                case _:
                    return at - 1, Progress.BROKEN
        return len(text), Progress.OPEN
