"""A bound on what a request's body may hold, before anything of it is parsed."""

from __future__ import annotations

from collections.abc import Collection

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 16 * 1024 * 1024


class BodyLimit:
    """ASGI middleware: ends the reading of a body that is too large with 413.

    FastAPI reads a whole body into memory before it asks who sent it. Paths in `exempt` read in pieces
    themselves.
    """

    def __init__(self, app: ASGIApp, *, exempt: Collection[str], max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._exempt = exempt
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http" or scope["path"] in self._exempt:
            await self._app(scope, receive, send)
            return
        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, f"The request's body is larger than {self._max_bytes} bytes.")
            return message

        await self._app(scope, receive_bounded, send)
