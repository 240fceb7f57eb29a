"""Single calls, as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from gateway.tools.forms import CallForm

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = r'\{\s*"name"\s*:\s*(%s)\s*,\s*"%s"\s*:\s*(?=\{)'
_LONGEST_HEAD = 512
_FIRST_KEYS = ('"name"', '"type"')


class CallText:
    """Reads one call, an object of JSON, whose name is to be a known one if `is_known` says so."""

    def __init__(self, form: CallForm, is_known: Callable[[str], bool]) -> None:
        self._form = form
        self._is_known = is_known
        self._head = re.compile(_HEAD % (_STRING, form.arguments), re.DOTALL)

    def head(self, text: str) -> tuple[str, int] | None:
        """Returns the function's name, and where its arguments begin; None while that cannot be said. It
        never can when they come before the name, or are no object: such a call is read as a whole.
        """
        found = self._head.match(text[:_LONGEST_HEAD])
        name = self._known(_loaded(found[1])) if found else None
        return (name, found.end()) if found and name else None

    def may_begin(self, text: str) -> bool:
        """Whether an object that begins so may be a call. Without a marker, only one that begins as calls do:
        it may as well be an answer.
        """
        if not self._form.bare:
            return True
        begun = text[1:_LONGEST_HEAD].lstrip()
        return any(begun.startswith(key[: len(begun)]) for key in _FIRST_KEYS)

    def whole(self, text: str) -> tuple[str, str] | None:
        """Returns the name and the arguments of a whole call; None when it is none."""
        call = _loaded(text)
        name = self._known(call.get("name")) if isinstance(call, dict) else None
        if name is None:
            return None
        arguments = call.get(self._form.arguments, {})
        # A model that was trained on OpenAI's form writes arguments as text.
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    def _known(self, name: Any) -> str | None:
        return name if isinstance(name, str) and name and self._is_known(name) else None


def _loaded(text: str) -> Any:
    """Returns what JSON says; None where it is none, or cannot be sent on: it can spell lone surrogates."""
    try:
        found = json.loads(text, strict=False)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found
