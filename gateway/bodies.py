"""Bodies of JSON, bounded before anything of them is parsed; large ones are read for known callers only."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import invalid_request, validation_error

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_UNKNOWN_BYTES = 64 * 1024
"""The most that is read before the caller's key."""

Body = TypeVar("Body", bound=BaseModel)


async def read_json(request: Request, kind: type[Body]) -> Body:
    """Returns the request's body as a `kind`.

    FastAPI would read and parse a body before it asks who sent it: a handler that takes large ones calls this
    instead, with its caller known. Raises ApiError 400 for what is no JSON, or no `kind`, with the field as
    `param`; HTTPException 413 for more than MAX_BODY_BYTES.
    """
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            _check_size(len(raw), MAX_BODY_BYTES)
    except ClientDisconnect:
        raise invalid_request("The body broke off.") from None
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid_request(
            f"The request's body is not valid JSON: {error}.", code="invalid_json"
        ) from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False)) from None


class BodyLimit:
    """ASGI middleware: ends the reading of a body that is too large with 413.

    FastAPI reads and parses a whole body before it asks for the caller's key. Handlers of the paths in
    `exempt`, and of those that begin with `exempt_below`, read theirs themselves, after that.
    """

    def __init__(self, app: ASGIApp, *, exempt: Collection[str], exempt_below: str) -> None:
        self._app = app
        self._exempt = exempt
        self._exempt_below = exempt_below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http" or self._is_exempt(scope["path"]):
            await self._app(scope, receive, send)
            return
        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            _check_size(received, MAX_UNKNOWN_BYTES)
            return message

        await self._app(scope, receive_bounded, send)

    def _is_exempt(self, path: str) -> bool:
        return path in self._exempt or path.startswith(self._exempt_below)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise HTTPException(413, f"The request's body is larger than {most:,} bytes, the most that is taken.")
