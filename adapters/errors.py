"""Errors of adapters that a user can cause."""

from __future__ import annotations

_SHOWN_CHARS = 120
_NAMED_CHARS = 300


class InvalidAdapter(Exception):
    """An adapter that cannot be served exactly as PEFT would run it.

    ``message`` is one or two sentences for a person, with the mend. ``field_or_tensor`` names the field of
    ``adapter_config.json``, the tensor, or the file at fault, as the upload writes it (cut when very long);
    None where it is the adapter as a whole.
    """

    def __init__(self, message: str, field_or_tensor: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field_or_tensor = field_or_tensor and field_or_tensor[:_NAMED_CHARS]


def shown(value: object) -> str:
    """A value from an untrusted file as one short printable piece of a sentence."""
    text = repr(value) if isinstance(value, str) else str(value)
    safe = text.encode("ascii", "backslashreplace").decode()
    return safe if len(safe) <= _SHOWN_CHARS else safe[: _SHOWN_CHARS - 1] + "…"


def listed(values: list[str], limit: int = 5) -> str:
    """The first few of many names, quoted, for an error's sentence."""
    head = ", ".join(shown(value) for value in values[:limit])
    return head if len(values) <= limit else f"{head} and {len(values) - limit} more"
