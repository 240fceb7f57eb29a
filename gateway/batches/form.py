"""Receives the form of `POST /v1/files`, bounded in size and time while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from gateway.errors import ApiError, invalid_request
from gateway.schemas.batches import LEAST_KEPT_S, MOST_KEPT_S
from gateway.uploads import MAX_PAUSE_S

MAX_FILE_BYTES = 200 * 1024 * 1024
"""OpenAI's own bound for batches."""
_FORM_BYTES = 64 * 1024
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_NAME = 255


@dataclass(frozen=True, slots=True)
class IncomingForm:
    """A form that has come. `content` is open as long as the form is."""

    filename: str
    content: IO[bytes]
    bytes: int
    kept_s: int


@asynccontextmanager
async def received_form(request: Request, *, default_kept_s: int) -> AsyncIterator[IncomingForm]:
    """Reads a form with `file`, `purpose=batch` and maybe `expires_after`. The file lies on disk meanwhile.

    Raises ApiError 4xx that names the fault; HTTPException 400 for what is no form.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        message = "A file is uploaded as multipart/form-data, with the fields 'file' and 'purpose'."
        raise ApiError(415, message, type="invalid_request_error", code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_FILE_BYTES + _FORM_BYTES:
        raise _too_large()
    bounded = Request(request.scope, _bounded(request))
    try:
        async with bounded.form(max_files=1, max_fields=len(_FIELDS), max_part_size=1024) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile) or not file.filename:
                raise _bad("The form has no file in the field 'file'.", "file")
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
            for name in fields:
                if name not in _FIELDS:
                    raise _bad(f"The form has a field {name[:80]!a}, which is not known.", name[:80])
            if fields.get("purpose") != "batch":
                raise _bad("'purpose' must be 'batch': files are kept for batches only.", "purpose")
            size = file.size or 0
            if size > MAX_FILE_BYTES:
                raise _too_large()
            name = file.filename.encode(errors="replace").decode()  # some charsets make what is no text
            yield IncomingForm(name[-_MAX_NAME:], file.file, size, _kept_s(fields, default_kept_s))
    except ClientDisconnect:
        raise _bad("The client went away during the upload.", None) from None


def _bounded(request: Request) -> Receive:
    """The request's `receive`. Raises ApiError 413 and 408 when too much comes, or nothing for too long."""
    size = 0

    async def receive() -> Message:
        nonlocal size
        try:
            async with asyncio.timeout(MAX_PAUSE_S):
                message = await request.receive()
        except TimeoutError:
            text = f"Nothing of the upload has come for {MAX_PAUSE_S:g} seconds: it was given up."
            raise ApiError(408, text, type="invalid_request_error", code="upload_timeout") from None
        size += len(message.get("body", b""))
        if size > MAX_FILE_BYTES + _FORM_BYTES:
            raise _too_large()
        return message

    return receive


def _kept_s(fields: dict[str, str], default: int) -> int:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default
    fits = anchor == "created_at" and (seconds or "").isdecimal() and len(seconds or "") < 10
    if not fits or not LEAST_KEPT_S <= int(seconds or 0) <= MOST_KEPT_S:
        message = (
            f"'expires_after' has an 'anchor', 'created_at', and {LEAST_KEPT_S} to {MOST_KEPT_S} 'seconds'."
        )
        raise _bad(message, "expires_after")
    return int(seconds or 0)


def _too_large() -> ApiError:
    message = f"The file is larger than {MAX_FILE_BYTES:,} bytes, the most that is taken."
    return ApiError(413, message, type="invalid_request_error", code="file_too_large", param="file")


def _bad(message: str, param: str | None) -> ApiError:
    return invalid_request(message, param=param, code="invalid_upload")
