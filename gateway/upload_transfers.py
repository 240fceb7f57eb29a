"""Appends to the files of upload sessions: of the connections to one gateway, one to a file at a time.

Several gateways may append to a file at once, each by the descriptor that it holds, however long ago the
client went. So what becomes a version is a copy, and its hash is the copy's. Locks would spare the copy where
all file systems that a store may lie on shared them between machines, and not all do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread
from starlette.requests import ClientDisconnect

from gateway.errors import ApiError, invalid_request
from gateway.incoming_files import FileWriter, IncomingFile, copy_hashed
from gateway.upload_sessions import ExpectedFile, UploadSession

OFFSET_HEADER = "Upload-Offset"

_IDLE_S = 60.0
_TOUCH_EVERY_S = 30.0


@dataclass(slots=True)
class _Transfer:
    """A connection that a file is coming from."""

    limit: asyncio.Timeout
    is_closing: bool = False
    """It has read its last byte, and writes what it has."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end_at(self, time: float) -> None:
        """Lets it read until then, on the event loop's clock."""
        if not self.is_closing and not self.limit.expired():
            self.limit.reschedule(time)

    def close(self) -> None:
        """Lets it write what it has, however long that takes."""
        if not self.limit.expired():
            self.limit.reschedule(None)
        self.is_closing = True


class UploadTransfers:
    """The transfers that run on this gateway, and which uploads it is completing."""

    def __init__(self) -> None:
        self._running: dict[Path, _Transfer] = {}
        self._completing: set[Path] = set()

    async def append(
        self, session: UploadSession, file: ExpectedFile, offset: int, chunks: AsyncIterator[bytes]
    ) -> None:
        """Writes a request's body to the end of a file, which is at `offset`. What has arrived stays, however
        the connection ends.

        A client that lost its connection may be back before the server has noticed: the later transfer of a
        file ends the earlier one. Raises ApiError: 409 when the file is elsewhere, 400 for more bytes than
        were announced or a body that broke off, 408 after a minute of silence.
        """
        path = session.folder / file.name
        while (earlier := self._running.get(path)) is not None:
            earlier.end_at(asyncio.get_running_loop().time())
            await earlier.ended.wait()
        transfer = self._running[path] = _Transfer(asyncio.timeout(_IDLE_S))
        try:
            async with transfer.limit:
                await self._append(session, file, offset, chunks, transfer)
        except TimeoutError:
            raise ApiError(
                408,
                "No byte of the file has come for a while, or it is sent by another connection now.",
                type="invalid_request_error",
                code="upload_timeout",
            ) from None
        finally:
            del self._running[path]
            transfer.ended.set()

    @contextmanager
    def completing(self, session: UploadSession) -> Iterator[None]:
        """Holds an upload for the block, which completes it. Raises ApiError 409 while another does."""
        if session.folder in self._completing:
            raise ApiError(
                409,
                "This upload is being completed by another request. Wait for its answer.",
                type="invalid_request_error",
                code="upload_completing",
            )
        self._completing.add(session.folder)
        try:
            yield
        finally:
            self._completing.remove(session.folder)

    async def copy(self, session: UploadSession, file: ExpectedFile, folder: Path) -> str:
        """Copies a file that has all arrived into `folder`. Returns the copy's hash in hex. Raises ApiError
        404 when the session has ended meanwhile, OSError.
        """
        source, target = session.folder / file.name, folder / file.name
        try:
            return await anyio.to_thread.run_sync(copy_hashed, source, target, file.bytes)
        except FileNotFoundError:
            raise upload_not_found() from None

    async def _append(
        self,
        session: UploadSession,
        file: ExpectedFile,
        offset: int,
        chunks: AsyncIterator[bytes],
        transfer: _Transfer,
    ) -> None:
        path = session.folder / file.name
        incoming = await self._open(path)
        writer, arrived = FileWriter(), incoming.size
        loop = asyncio.get_running_loop()
        touched = loop.time()
        try:
            if arrived != offset:
                raise offset_mismatch(file.name, arrived)
            async for chunk in chunks:
                arrived += len(chunk)
                if arrived > file.bytes:
                    message = f"The file '{file.name}' was announced with {file.bytes} bytes, but has more."
                    raise invalid_request(message, param="files", code="invalid_upload")
                writer.add(incoming, chunk)
                await writer.pace()
                transfer.end_at(loop.time() + _IDLE_S)
                if loop.time() - touched > _TOUCH_EVERY_S:
                    touched = loop.time()
                    session.touch()
        except ClientDisconnect:
            raise invalid_request("The body broke off.", code="upload_aborted") from None
        finally:
            transfer.close()
            try:
                await writer.finish()
            finally:
                incoming.close()

    async def _open(self, path: Path) -> IncomingFile:
        try:
            return await anyio.to_thread.run_sync(IncomingFile.resume, path)
        except FileNotFoundError:
            raise upload_not_found() from None


def offset_mismatch(name: str, offset: int) -> ApiError:
    """Returns the 409 that says where a file is."""
    return ApiError(
        409,
        f"The file '{name}' has {offset} bytes here: go on from there, with '{OFFSET_HEADER}: {offset}'.",
        type="invalid_request_error",
        code="offset_mismatch",
        param=OFFSET_HEADER,
        headers={OFFSET_HEADER: str(offset)},
    )


def upload_not_found() -> ApiError:
    """Returns the 404 of an upload that is not there, or not this tenant's."""
    message = "There is no such upload: it is complete, was given up or has expired. Start it again."
    return ApiError(404, message, type="invalid_request_error", code="upload_not_found")
