"""Receives an adapter upload: multipart/form-data from the socket to a staging folder, in flat memory.

The parser hands out slices of each network chunk; they are gathered to about a megabyte and written by a
worker thread, so the event loop neither waits for the disk nor holds more than that. Names and sizes are
checked as they arrive, and a fault ends the upload at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from adapters.peft_config import MAX_CONFIG_BYTES
from adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE
from gateway.errors import ApiError, invalid_request

_MAX_FIELD_BYTES = 1024
_FIELDS = frozenset({"name", "allow_zero"})
_WRITE_BYTES = 1024 * 1024
_MAX_PARTS = 8
_FORM_BYTES = MAX_CONFIG_BYTES + 64 * 1024  # what all but the weights may take


@dataclass(slots=True)
class Upload:
    """A received form: its fields as text, and the names of the files that now lie in the staging folder."""

    fields: dict[str, str] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)


async def receive_upload(
    chunks: AsyncIterator[bytes],
    *,
    content_type: str,
    content_length: str | None,
    folder: Path,
    max_bytes: int,
) -> Upload:
    """Reads the form from the request's body and writes its two files into `folder`.

    Raises ApiError 4xx that names the fault, as soon as it is seen; and what `chunks` raises, when the client
    goes away. Whoever owns `folder` removes what was written.
    """
    boundary = _boundary_of(content_type)
    if content_length and content_length.isdecimal() and int(content_length) > max_bytes + _FORM_BYTES:
        raise _too_large(max_bytes)
    try:
        receiver = _Receiver(boundary, folder, max_bytes)
    except FormParserError as error:
        raise _bad_form(f"The form's boundary cannot be used: {error}.") from None
    try:
        async for chunk in chunks:
            receiver.feed(chunk)
            await receiver.flush(at_least=_WRITE_BYTES)
        await receiver.finish()
    finally:
        receiver.close()
    return receiver.upload


class _Receiver:
    """The parser's callbacks, and the part that they are in."""

    def __init__(self, boundary: bytes, folder: Path, max_bytes: int) -> None:
        self.upload = Upload()
        self._folder = folder
        self._max_bytes = max_bytes
        self._received = 0
        self._parts = 0
        self._ended = False
        self._header_name = b""
        self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field: str | None = None
        self._value = b""
        self._file: BinaryIO | None = None
        self._file_name = ""
        self._file_left = 0
        self._writes: list[tuple[BinaryIO, list[bytes]]] = []  # what the worker thread writes next, in order
        self._gathered = 0
        self._opened: list[BinaryIO] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, chunk: bytes) -> None:
        """Parses one chunk of the body. Raises ApiError."""
        self._received += len(chunk)
        if self._received > self._max_bytes + _FORM_BYTES:
            raise _too_large(self._max_bytes)
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _bad_form(f"The body is not valid multipart/form-data: {error}.") from None

    async def flush(self, *, at_least: int) -> None:
        """Writes what was gathered, in a worker thread, once it is `at_least` this many bytes."""
        if self._gathered < max(at_least, 1):
            return
        writes, self._writes, self._gathered = self._writes, [], 0
        await anyio.to_thread.run_sync(_write_all, writes)

    async def finish(self) -> None:
        """Writes the rest. Raises ApiError when the form broke off or lacks a part."""
        if not self._ended:
            raise _bad_form("The body ends before the form does: the upload was cut short.")
        await self.flush(at_least=1)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if name not in self.upload.files:
                raise _bad_form(f"The form has no file '{name}'.", param="files")
        if "name" not in self.upload.fields:
            raise _bad_form("The form has no field 'name'.", param="name")

    def close(self) -> None:
        """Closes the files."""
        for file in self._opened:
            file.close()

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _bad_form(f"The form has more than {_MAX_PARTS} parts.")
        self._headers = {}

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        file_name = options.get(b"filename")
        if file_name is not None:
            self._begin_file(name, file_name.decode("utf-8", "replace"))
        elif name not in _FIELDS:
            message = f"The form has a field {_shown(name)}; it may have 'name', 'allow_zero' and 'files'."
            raise _bad_form(message)
        elif name in self.upload.fields:
            raise _bad_form(f"The form has the field '{name}' twice.", param=name)
        else:
            self._field, self._value = name, b""

    def _begin_file(self, name: str, file_name: str) -> None:
        if name != "files" or file_name not in (CONFIG_FILE, WEIGHTS_FILE):
            message = f"The file {_shown(file_name)} (field {_shown(name)}) is no part of an adapter: send"
            message += f" '{CONFIG_FILE}' and '{WEIGHTS_FILE}' as 'files'. Pickled weights are never read."
            raise _bad_form(message, param="files")
        if file_name in self.upload.files:
            raise _bad_form(f"The form has the file '{file_name}' twice.", param="files")
        self.upload.files.add(file_name)
        self._file = (self._folder / file_name).open("xb")
        self._opened.append(self._file)
        self._file_name = file_name
        self._file_left = _limit_of(file_name, self._max_bytes)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is None:
            self._value += data[start:end]
            if len(self._value) > _MAX_FIELD_BYTES:
                message = f"The field '{self._field}' is longer than {_MAX_FIELD_BYTES} bytes."
                raise _bad_form(message, self._field)
            return
        self._file_left -= end - start
        if self._file_left < 0:
            raise _too_large(_limit_of(self._file_name, self._max_bytes), self._file_name)
        if not self._writes or self._writes[-1][0] is not self._file:
            self._writes.append((self._file, []))
        self._writes[-1][1].append(data[start:end])
        self._gathered += end - start

    def _on_part_end(self) -> None:
        if self._file is None and self._field is not None:
            try:
                self.upload.fields[self._field] = self._value.decode()
            except UnicodeDecodeError:
                raise _bad_form(f"The field '{self._field}' is not UTF-8.", self._field) from None
        self._file = self._field = None

    def _on_end(self) -> None:
        self._ended = True


def _write_all(writes: list[tuple[BinaryIO, list[bytes]]]) -> None:
    for file, pieces in writes:
        file.writelines(pieces)
        file.flush()


def _boundary_of(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(
            415,
            "An adapter is uploaded as multipart/form-data, as the `adapters upload` command does.",
            type="invalid_request_error",
            code="unsupported_media_type",
        )
    return options[b"boundary"]


def _limit_of(file_name: str, max_bytes: int) -> int:
    return MAX_CONFIG_BYTES if file_name == CONFIG_FILE else max_bytes


def _too_large(limit: int, file_name: str | None = None) -> ApiError:
    what = f"The file '{file_name}'" if file_name else "The upload"
    message = f"{what} is larger than {limit:,} bytes, the most that is taken."
    return ApiError(413, message, type="invalid_request_error", code="upload_too_large", param="files")


def _bad_form(message: str, param: str | None = None) -> ApiError:
    return invalid_request(message, param=param, code="invalid_upload")


def _shown(text: str) -> str:
    """Text of a client as it may stand in a message: quoted, escaped, short."""
    return ascii(text if len(text) <= 80 else text[:80] + "...")
