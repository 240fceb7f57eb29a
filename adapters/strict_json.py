"""JSON as an untrusted upload may write it: one meaning or none."""

from __future__ import annotations

import json
from typing import Any


class NotStrictJson(ValueError):
    """The bytes are not JSON, or mean different things to different readers. The message completes 'it …'."""


def load_object(raw: bytes) -> dict[str, Any]:
    """Parses a JSON object; refuses duplicate keys, NaN and Infinity, text that is none, and endless nesting.

    The caller bounds ``len(raw)``. Raises `NotStrictJson`.
    """
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        if rb"\ud" in raw.lower() and not _is_text(value):
            raise NotStrictJson("holds half of a surrogate pair, which is no text")
    except NotStrictJson:
        raise
    except UnicodeDecodeError:
        raise NotStrictJson("is not UTF-8 text") from None
    except RecursionError:
        raise NotStrictJson("is nested too deeply") from None
    except ValueError as error:
        raise NotStrictJson(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise NotStrictJson("holds no JSON object")
    return value


def _is_text(value: Any) -> bool:
    """Whether all strings can be written out again: an escape such as \\ud800 alone makes one that cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise NotStrictJson(f"has the key {twice[:80]!a} twice")
    return result


def _no_constant(name: str) -> Any:
    raise NotStrictJson(f"contains {name}, which is no JSON number")
