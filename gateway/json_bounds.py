"""How much structure a body of JSON may have, found out before it is parsed.

A parser holds the interpreter while it makes objects: eight megabytes of `[],` are some seconds in which
nobody is served. Text costs nothing like it, so brackets inside strings do not count.
"""

from __future__ import annotations

import re

from gateway.errors import ApiError, invalid_request

MAX_FIELDS = 65_536
"""Lists, objects and fields of objects, in all."""
MAX_VALUES = 524_288
"""Commas: about as many numbers are in a prompt of token ids."""

_SLICE = 64 * 1024
_ESCAPE = re.compile(rb"\\.", re.DOTALL)


def check_structure(raw: bytes | bytearray) -> None:
    """Raises ApiError 400 for JSON that would take too long to parse.

    Takes some ms a megabyte, in short steps: a thread that runs this lets others run.
    """
    if len(raw) <= MAX_FIELDS or (_fields(raw) <= MAX_FIELDS and raw.count(b",") <= MAX_VALUES):
        return
    fields = values = 0
    inside = False
    rest = b""
    for at in range(0, len(raw), _SLICE):
        piece = _ESCAPE.sub(b"", rest + raw[at : at + _SLICE])
        rest = b"\\" if piece.endswith(b"\\") else b""  # what it escapes is in the next slice
        parts = piece.split(b'"')
        outside = b" ".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
        fields += _fields(outside)
        values += outside.count(b",")
        if fields > MAX_FIELDS or values > MAX_VALUES:
            raise too_much()


def _fields(text: bytes | bytearray) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def too_much() -> ApiError:
    """Returns the 400 for a body of too many parts."""
    return invalid_request(
        f"The request's body has more than {MAX_FIELDS:,} lists, objects and fields, or more than "
        f"{MAX_VALUES:,} values: send less at once.",
        code="too_complex",
    )
