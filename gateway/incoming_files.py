"""Bytes from the network on their way to files: gathered on the event loop, hashed and written by a thread.

The thread works on one batch while the next is gathered, so an upload is as fast as the slower of the two;
memory holds two batches. The event loop neither waits for the disk nor hashes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread

_BATCH_BYTES = 2 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_PIECE_BYTES = 256
"""What a gathered piece takes beside its bytes, so that very small ones are not gathered by the million."""

Piece = bytes | memoryview


class IncomingFile:
    """A file that grows at its end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self._file = file

    @classmethod
    def resume(cls, path: Path) -> IncomingFile:
        """A file that may be there in part. Blocks on the disk."""
        return cls(path, path.open("ab", buffering=0))

    def write(self, pieces: list[Piece]) -> None:
        """Appends all pieces, or raises OSError: then `size` tells how much it has. Blocks on the disk."""
        left = memoryview(b"".join(pieces))
        while left:
            count = self._file.write(left)
            self._note(left[:count])
            left = left[count:]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _note(self, written: memoryview) -> None:
        self.size += len(written)


class HashedFile(IncomingFile):
    """A new file, and the hash of all that it holds."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(path, file)
        self._sha = hashlib.sha256()

    @classmethod
    def create(cls, path: Path) -> HashedFile:
        """An empty one. Raises FileExistsError."""
        return cls(path, path.open("xb", buffering=0))

    @property
    def sha256(self) -> str:
        """The hash in hex, of what has been written."""
        return self._sha.hexdigest()

    def _note(self, written: memoryview) -> None:
        super()._note(written)
        self._sha.update(written)


def copy_hashed(source: Path, target: Path, nbytes: int) -> str:
    """Copies the first `nbytes` of a file to a new one. Returns SHA-256 in hex of the copy, which whoever has
    the source open cannot change. Blocks on the disk.
    """
    copy = HashedFile.create(target)
    try:
        with source.open("rb", buffering=0) as file:
            while piece := file.read(min(_READ_BYTES, nbytes - copy.size)):
                copy.write([piece])
    finally:
        copy.close()
    return copy.sha256


class FileWriter:
    """Takes pieces of files in order, and has them written behind. Use one at a time, from one task."""

    def __init__(self) -> None:
        self._gathered: list[tuple[IncomingFile, list[Piece]]] = []
        self._nbytes = 0
        self._writing: asyncio.Task[None] | None = None

    def add(self, file: IncomingFile, piece: Piece) -> None:
        """Gathers a piece for the end of `file`."""
        if not self._gathered or self._gathered[-1][0] is not file:
            self._gathered.append((file, []))
        self._gathered[-1][1].append(piece)
        self._nbytes += len(piece) + _PIECE_BYTES

    async def pace(self) -> None:
        """Begins to write once enough is gathered; waits for the batch before. Raises OSError of that."""
        if self._nbytes >= _BATCH_BYTES:
            await self._begin()

    async def finish(self) -> None:
        """Writes the rest and waits for it. Raises OSError."""
        await self._begin()
        await self.settle()

    async def settle(self) -> None:
        """Waits for what is being written, so that files may be closed; what is only gathered is dropped.

        Raises OSError of the writing.
        """
        self._gathered, self._nbytes = [], 0
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def _begin(self) -> None:
        batch = self._gathered
        await self.settle()
        self._writing = asyncio.create_task(anyio.to_thread.run_sync(_write, batch))


def _write(batch: list[tuple[IncomingFile, list[Piece]]]) -> None:
    for file, pieces in batch:
        file.write(pieces)
