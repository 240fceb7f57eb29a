"""Bodies of JSON, bounded in size, time and structure before they are parsed; large ones are read for known
callers only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapters.loop_timeout import LoopTimeout
from gateway.errors import ApiError, error_response, invalid_request, validation_error
from gateway.json_bounds import check_structure

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_UNKNOWN_BYTES = 64 * 1024
"""The most that is read before the caller's key."""
MAX_BODY_S = 120.0
"""In what time a body must have come. Uploads of adapters have no such bound, but must not pause."""

_LARGE_BYTES = 64 * 1024
"""Larger ones are parsed in a thread: that takes some ms and more."""

Body = TypeVar("Body", bound=BaseModel)


async def read_json(request: Request, kind: type[Body]) -> Body:
    """Returns the request's body as a `kind`.

    FastAPI would read and parse a body before it asks who sent it: a handler that takes large ones calls this
    instead, with its caller known. Notes the body's size as `request.state.body_bytes`. Raises ApiError 400
    for what is no JSON, or no `kind`, with the field as `param`, and 415 for a content encoding;
    HTTPException 413 for more than MAX_BODY_BYTES, and 408 for what has not come after MAX_BODY_S.
    """
    _check_encoding(request.headers.get("content-encoding", ""))
    raw, more = bytearray(), True
    try:
        async with LoopTimeout(MAX_BODY_S):
            # Not `request.stream()`, which is a generator: the event loop keeps a list of those.
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise invalid_request("The body broke off.")
                raw += message.get("body", b"")
                more = message.get("more_body", False)
                _check_size(len(raw), MAX_BODY_BYTES)
    except TimeoutError:
        raise _too_slow() from None
    request.state.body_bytes = len(raw)
    if len(raw) > _LARGE_BYTES:
        return await asyncio.to_thread(_parse, raw, kind)
    return _parse(raw, kind)


def _parse(raw: bytearray, kind: type[Body]) -> Body:
    check_structure(raw)
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
    """ASGI middleware: ends the reading of a body that is too large with 413, and of one that takes too long
    with 408. Refuses content encodings with 415.

    FastAPI reads and parses a whole body before it asks for the caller's key. Handlers of the paths in
    `exempt`, and of those that begin with `exempt_below`, read theirs themselves, after that.
    """

    def __init__(self, app: ASGIApp, *, exempt: Collection[str], exempt_below: str) -> None:
        self._app = app
        self._exempt = exempt
        self._exempt_below = exempt_below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_encoding(Headers(scope=scope).get("content-encoding", ""))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        if self._is_exempt(scope["path"]):
            await self._app(scope, receive, send)
            return
        received = 0
        deadline: float | None = asyncio.get_running_loop().time() + MAX_BODY_S

        async def receive_bounded() -> Message:
            nonlocal received, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _too_slow() from None
            received += len(message.get("body", b""))
            _check_size(received, MAX_UNKNOWN_BYTES)
            if not message.get("more_body"):
                deadline = None
            return message

        await self._app(scope, receive_bounded, send)

    def _is_exempt(self, path: str) -> bool:
        return path in self._exempt or path.startswith(self._exempt_below)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise HTTPException(413, f"The request's body is larger than {most:,} bytes, the most that is taken.")


def _too_slow() -> HTTPException:
    return HTTPException(408, f"The request's body did not arrive within {MAX_BODY_S:g} seconds.")


def _check_encoding(encoding: str) -> None:
    if encoding.lower() not in ("", "identity"):
        raise ApiError(
            415,
            "The request's body has a Content-Encoding, which is not read: send it as it is.",
            type="invalid_request_error",
            code="unsupported_content_encoding",
        )
