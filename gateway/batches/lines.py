"""The lines of a batch's input: JSON objects with `custom_id`, `method`, `url` and `body`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from adapters.file_store import FileStore
from gateway.bodies import MAX_BODY_BYTES
from gateway.errors import ApiError
from gateway.json_bounds import check_structure

MAX_LINES = 50_000
_MAX_NUMBER = 2 * MAX_LINES
"""Of a line, blank ones included: each has a bit in Redis."""
MAX_CUSTOM_ID = 512
_MAX_DEPTH = 254
"""What orjson writes; it reads 1,023."""
_MAX_FAULTS = 100
_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `number` counts from 1, blank lines too."""

    number: int
    custom_id: str
    body: dict[str, Any]


class BadLine(Exception):
    """A line that cannot be a request of the batch: a word for programs, a sentence, and the field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class InputGone(Exception):
    """What a batch was to read is not there any more."""


class Unreadable(Exception):
    """Lines that are not read on from: what is wrong, as for BadLine, and with which."""

    def __init__(self, code: str, message: str, number: int) -> None:
        super().__init__(message)
        self.code = code
        self.number = number


def raw_lines(files: FileStore, name: str, size: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers. Blocks on the store, whenever it reads on.

    Raises OSError, InputGone, and Unreadable.
    """
    number, rest = 0, b""
    for start in range(0, size, _PIECE_BYTES):
        try:
            piece = files.read(name, start, min(_PIECE_BYTES, size - start))
        except FileNotFoundError:
            raise InputGone from None
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            number += 1
            if number > _MAX_NUMBER:
                message = f"The file has more than {_MAX_NUMBER:,} lines: leave the blank ones out."
                raise Unreadable("too_many_lines", message, number)
            if line.strip():
                yield number, line
        if len(rest) > MAX_BODY_BYTES:
            message = f"The line is longer than {MAX_BODY_BYTES:,} bytes."
            raise Unreadable("line_too_long", message, number + 1)
    if rest.strip():
        yield number + 1, rest


def parse_line(number: int, raw: bytes, endpoint: str) -> Line:
    """What a line says. Raises BadLine."""
    try:
        check_structure(raw)
        value = orjson.loads(raw)
    except ApiError as error:
        raise BadLine("too_complex", error.message) from None
    except orjson.JSONDecodeError as error:
        raise BadLine("invalid_json_line", f"The line is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadLine("invalid_json_line", "The line is no JSON object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"'custom_id' must be a text of 1 to {MAX_CUSTOM_ID} characters."
        raise BadLine("invalid_custom_id", message, "custom_id")
    if value.get("method") != "POST":
        raise BadLine("invalid_method", "'method' must be \"POST\".", "method")
    if value.get("url") != endpoint:
        raise BadLine("mismatched_endpoint", f"'url' must be the batch's endpoint, {endpoint}.", "url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "'body' must be a JSON object.", "body")
    if body.get("stream"):
        raise BadLine("invalid_body", "Answers in batches are not streamed: leave 'stream' out.", "body")
    return Line(number, custom_id, body)


def check_lines(files: FileStore, name: str, size: int, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """How many requests a file has, and what is wrong with it: OpenAI's error objects, the first hundred.

    Blocks. Raises OSError, InputGone.
    """
    count, faults = 0, list[dict[str, Any]]()
    seen: dict[str, int] = {}
    try:
        for number, raw in raw_lines(files, name, size):
            count += 1
            if count > MAX_LINES:
                message = f"The file has more than {MAX_LINES:,} requests: make several batches of it."
                return count, [*faults, _fault("too_many_tasks", message)]
            try:
                line = parse_line(number, raw, endpoint)
                _check_depth(line)
                custom_id = line.custom_id
                first = seen.setdefault(custom_id, number)
                if first != number:
                    message = f"Line {first} has this 'custom_id', too."
                    raise BadLine("duplicate_custom_id", message, "custom_id")
            except BadLine as error:
                faults.append(_fault(error.code, str(error), error.param, number))
                if len(faults) == _MAX_FAULTS:
                    return count, faults
    except Unreadable as error:
        faults.append(_fault(error.code, str(error), None, error.number))
    if not count and not faults:
        faults.append(_fault("empty_file", "The file has no requests."))
    return count, faults


def _check_depth(line: Line) -> None:
    """Raises BadLine for a body that could be read, but not written for its route: orjson reads deeper."""
    try:
        orjson.dumps(line.body)
    except orjson.JSONEncodeError:
        message = f"'body' has lists or objects in one another, more than {_MAX_DEPTH} deep: nest them less."
        raise BadLine("too_complex", message, "body") from None


def _fault(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
