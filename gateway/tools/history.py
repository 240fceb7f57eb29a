"""What a chat template sees of calls that were made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from gateway.json_bounds import check_structure
from gateway.tools.forms import MISTRAL, CallForm

_MISTRAL_ID = 9


def prepare_history(messages: Sequence[dict[str, Any]], form: CallForm | None) -> None:
    """Makes calls in messages what templates expect, in place: arguments as objects instead of text, where
    they are JSON, and for Mistral's templates ids of nine characters.

    Raises ApiError 400 when there is more in the arguments than a body may have.
    """
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if calls:
        texts = [call["function"]["arguments"] for call in calls]
        check_structure(" ".join(texts).encode(errors="replace"))
        for call, text in zip(calls, texts, strict=True):
            call["function"]["arguments"] = _arguments(text)
    if form is MISTRAL:
        for entry, key in [(call, "id") for call in calls] + [(each, "tool_call_id") for each in messages]:
            if key in entry:
                entry[key] = _mistral_id(entry[key])


def _arguments(text: str) -> Any:
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()  # JSON can spell lone surrogates, which no prompt can
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _mistral_id(given: str) -> str:
    """The templates refuse other ids. The same id becomes the same one, so that results belong to calls."""
    if len(given) == _MISTRAL_ID and given.isascii() and given.isalnum():
        return given
    return hashlib.blake2b(given.encode(errors="replace")).hexdigest()[:_MISTRAL_ID]
