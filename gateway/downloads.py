"""A file of the store on its way to a client."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from contextlib import AbstractContextManager, ExitStack

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class Download(StreamingResponse):
    """The pieces of a file. What is `held` while they are read is let go once the last has been sent, or the
    client has gone.
    """

    def __init__(
        self,
        pieces: AsyncIterable[bytes] | Iterable[bytes],
        *,
        headers: dict[str, str],
        held: AbstractContextManager[object],
    ) -> None:
        super().__init__(pieces, media_type="application/octet-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        with self._held:
            await super().__call__(scope, receive, send)


def holding(slot: AbstractContextManager[object]) -> ExitStack:
    """Takes a slot. `pop_all` hands it to a Download; as a context manager it gives back what was not."""
    held = ExitStack()
    held.enter_context(slot)
    return held
