"""A file of the store on its way to a client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, suppress

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from adapters.blob_store import BlobNotFound

logger = logging.getLogger(__name__)


class Download(StreamingResponse):
    """The pieces of a file. What is `held` while they are read is let go once the last has been sent, or the
    client has gone and the piece that was being read is there: the store works on it until then. Where the
    store fails before that, the log says so, and the connection is closed: by the length that was announced,
    the client knows that it has not all.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        *,
        headers: dict[str, str],
        held: AsyncExitStack,
    ) -> None:
        super().__init__(self._until_fault(), media_type="application/octet-stream", headers=headers)
        self._pieces = pieces
        self._held = held
        self._coming: asyncio.Future[bytes] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        async with self._held:
            try:
                with suppress(_BrokenOff):
                    await super().__call__(scope, receive, send)
            finally:
                if self._coming is not None:
                    await asyncio.gather(self._coming, return_exceptions=True)

    async def _until_fault(self) -> AsyncIterator[bytes]:
        try:
            while True:
                self._coming = asyncio.ensure_future(anext(self._pieces, b""))
                piece = await asyncio.shield(self._coming)
                if not piece:
                    return
                yield piece
        except (OSError, BlobNotFound) as error:
            logger.error("a file could not be sent to its end: %s", error)
            raise _BrokenOff from None


class _BrokenOff(Exception):
    """The answer has begun and cannot go on."""


def holding(slot: AbstractContextManager[object]) -> AsyncExitStack:
    """Takes a slot. `pop_all` hands it to a Download; as a context manager it gives back what was not."""
    held = AsyncExitStack()
    held.enter_context(slot)
    return held
