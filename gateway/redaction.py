"""Takes the secrets of API keys out of what is logged and answered, wherever a client has put them.

Nothing here writes a key on purpose. But a key that is pasted for a model's name comes back in "there is no
model ...", and one in a path would be logged when the request fails.
"""

from __future__ import annotations

import logging
import re

_SECRET = re.compile(r"(lpx_[a-z0-9]{1,32}_)[A-Za-z0-9_-]{8,}")


def redact(text: str) -> str:
    """Returns the text with `***` for the secret part of each key; ids stay."""
    return _SECRET.sub(r"\1***", text) if "lpx_" in text else text


class RedactingFormatter(logging.Formatter):
    """Formats log records as its base does, tracebacks included, without the secrets of keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's text."""
        return redact(super().format(record))
