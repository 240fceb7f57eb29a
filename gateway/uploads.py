"""Receives an adapter upload: multipart/form-data from the socket to a staging folder, in flat memory.

Names and sizes are checked as they arrive, and a fault ends the upload at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from adapters.adapter_files import (
    CONFIG_FILE,
    MAX_FILES,
    MAX_SMALL_BYTES,
    WEIGHTS_FILE,
    check_complete,
    is_adapter_file,
    size_limit,
)
from adapters.errors import InvalidAdapter
from gateway.errors import ApiError, invalid_request
from gateway.incoming_files import FileWriter, HashedFile

MAX_PAUSE_S = 60.0
"""How long an upload may send nothing."""

_MAX_FIELD_BYTES = 1024
_FIELDS = frozenset({"name", "allow_zero", "promote"})
_MAX_PARTS = MAX_FILES + len(_FIELDS)
_FORM_BYTES = MAX_SMALL_BYTES + 64 * 1024  # what all but the weights may take


@dataclass(slots=True)
class Upload:
    """A received form: its fields as text, and SHA-256 in hex of each file that now lies in the folder."""

    fields: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


async def receive_upload(
    chunks: AsyncIterator[bytes],
    *,
    content_type: str,
    content_length: str | None,
    folder: Path,
    max_bytes: int,
) -> Upload:
    """Reads the form from the request's body and writes its files into `folder`.

    `max_bytes` is what all files of weights may take together. Raises ApiError 4xx that names the fault, as
    soon as it is seen; and what `chunks` raises, when the client goes away. Whoever owns `folder` removes
    what was written.
    """
    boundary = _boundary_of(content_type)
    if content_length and content_length.isdecimal() and int(content_length) > max_bytes + _FORM_BYTES:
        raise _too_large(max_bytes)
    try:
        receiver = _Receiver(boundary, folder, max_bytes)
    except FormParserError as error:
        raise _bad_form(f"The form's boundary cannot be used: {error}.") from None
    try:
        async for chunk in _steady(chunks):
            receiver.feed(chunk)
            await receiver.writer.pace()
        return await receiver.finish()
    finally:
        await receiver.close()


async def _steady(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks. Raises ApiError 408 when the next one does not come."""
    while True:
        try:
            async with asyncio.timeout(MAX_PAUSE_S):
                chunk = await anext(chunks, None)
        except TimeoutError:
            message = f"Nothing of the upload has come for {MAX_PAUSE_S:g} seconds: it was given up."
            raise ApiError(408, message, type="invalid_request_error", code="upload_timeout") from None
        if chunk is None:
            return
        yield chunk


class _Receiver:
    """The parser's callbacks, and the part that they are in."""

    def __init__(self, boundary: bytes, folder: Path, max_bytes: int) -> None:
        self.writer = FileWriter()
        self._fields: dict[str, str] = {}
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
        self._file: HashedFile | None = None
        self._file_left = 0
        self._files: dict[str, HashedFile] = {}
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

    async def finish(self) -> Upload:
        """Writes the rest. Raises ApiError when the form broke off or lacks a part."""
        if not self._ended:
            raise _bad_form("The body ends before the form does: the upload was cut short.")
        await self.writer.finish()
        try:
            check_complete(self._files)
        except InvalidAdapter as error:
            raise _bad_form(error.message, param="files") from None
        if "name" not in self._fields:
            raise _bad_form("The form has no field 'name'.", param="name")
        return Upload(self._fields, {name: file.sha256 for name, file in self._files.items()})

    async def close(self) -> None:
        """Closes the files, once nobody writes to them."""
        with suppress(OSError):
            await self.writer.settle()
        for file in self._files.values():
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
            message = f"The form has a field {_shown(name)}; it may have 'name', 'allow_zero', 'promote' and"
            message += " 'files'."
            raise _bad_form(message)
        elif name in self._fields:
            raise _bad_form(f"The form has the field '{name}' twice.", param=name)
        else:
            self._field, self._value = name, b""

    def _begin_file(self, name: str, file_name: str) -> None:
        if name != "files" or not is_adapter_file(file_name):
            message = f"The file {_shown(file_name)} (field {_shown(name)}) is no part of an adapter: send"
            message += f" '{CONFIG_FILE}', '{WEIGHTS_FILE}' or its shards, and the files of its tokenizer if"
            message += " it has its own, as 'files'. Pickled weights are never read."
            raise _bad_form(message, param="files")
        if file_name in self._files:
            raise _bad_form(f"The form has the file '{file_name}' twice.", param="files")
        self._file = self._files[file_name] = HashedFile.create(self._folder / file_name)
        self._file_left = size_limit(file_name, self._max_bytes)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is None:
            self._value += data[start:end]
            if len(self._value) > _MAX_FIELD_BYTES:
                message = f"The field '{self._field}' is longer than {_MAX_FIELD_BYTES} bytes."
                raise _bad_form(message, self._field)
            return
        self._file_left -= end - start
        if self._file_left < 0:
            name = self._file.path.name
            raise _too_large(size_limit(name, self._max_bytes), name)
        self.writer.add(self._file, memoryview(data)[start:end])

    def _on_part_end(self) -> None:
        if self._file is None and self._field is not None:
            try:
                self._fields[self._field] = self._value.decode()
            except UnicodeDecodeError:
                raise _bad_form(f"The field '{self._field}' is not UTF-8.", self._field) from None
        self._file = self._field = None

    def _on_end(self) -> None:
        self._ended = True


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


def _too_large(limit: int, file_name: str | None = None) -> ApiError:
    what = f"The file '{file_name}'" if file_name else "The upload"
    message = f"{what} is larger than {limit:,} bytes, the most that is taken."
    return ApiError(413, message, type="invalid_request_error", code="upload_too_large", param="files")


def _bad_form(message: str, param: str | None = None) -> ApiError:
    return invalid_request(message, param=param, code="invalid_upload")


def _shown(text: str) -> str:
    """Text of a client as it may stand in a message: quoted, escaped, short."""
    return ascii(text if len(text) <= 80 else text[:80] + "...")
