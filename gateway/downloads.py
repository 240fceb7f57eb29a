"""A file of the store on its way to a client."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractContextManager, ExitStack, suppress

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from adapters.blob_store import BlobNotFound

logger = logging.getLogger(__name__)


class Download(StreamingResponse):
    """The pieces of a file. What is `held` while they are read is let go once the last has been sent, or the
    client has gone. Where the store fails before that, the log says so, and the connection is closed: by the
    length that was announced, the client knows that it has not all.
    """

    def __init__(
        self,
        pieces: AsyncIterable[bytes],
        *,
        headers: dict[str, str],
        held: AbstractContextManager[object],
    ) -> None:
        super().__init__(_until_fault(pieces), media_type="application/octet-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        with self._held, suppress(_BrokenOff):
            await super().__call__(scope, receive, send)


class _BrokenOff(Exception):
    """The answer has begun and cannot go on."""


async def _until_fault(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces:
            yield piece
    except (OSError, BlobNotFound) as error:
        logger.error("a file could not be sent to its end: %s", error)
        raise _BrokenOff from None


def holding(slot: AbstractContextManager[object]) -> ExitStack:
    """Takes a slot. `pop_all` hands it to a Download; as a context manager it gives back what was not."""
    held = ExitStack()
    held.enter_context(slot)
    return held
