"""What the ledger cannot tell Redis waits in a file, and outlives its gateway there.

    <folder>/<writer>.journal     a line per record: [number, tenant, kind, entry]

Each writer has a file of its own, and holds a lock on it while it lives. A file whose lock is free has lost
its writer, and is adopted by the next gateway that looks. Lines are handed to the system with each append, so
they survive the process, if not the machine. A line that a crash tore is passed over.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from gateway.accounts.settle import Kind, Record

logger = logging.getLogger(__name__)

_SUFFIX = ".journal"
_READ_BYTES = 1 << 18
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records from the head of a journal. `end` is where what follows them begins, in bytes."""

    records: Sequence[Record]
    end: int


class Journal:
    """A writer's file. For one thread at a time. Methods raise OSError for what the disk does not do."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """`descriptor` is open on `path`, and locked; use `create` or `adopt`."""
        self.writer = path.stem
        self._path = path
        self._descriptor = descriptor
        self._start = 0  # of what has not been forgotten
        self._end = os.fstat(descriptor).st_size

    @classmethod
    def create(cls, folder: Path, writer: str) -> Journal:
        """Makes the file of a new writer, and the folder."""
        path = folder / (writer + _SUFFIX)
        for _ in range(_TRIES):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(path, os.O_RDWR | os.O_CREAT)
            if descriptor is not None:  # else somebody took it for a dead one's before it was locked
                return cls(path, descriptor)
        raise OSError(errno.EAGAIN, "others keep locking it", str(path))

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return self._start == self._end

    def append(self, records: Sequence[Record]) -> None:
        """Writes records behind what is there: all of them, or none when it raises."""
        lines = b"".join(
            orjson.dumps([record.number, record.tenant, record.kind, record.entry]) + b"\n"
            for record in records
        )
        written = 0
        try:
            while written < len(lines):
                written += os.pwrite(self._descriptor, lines[written:], self._end + written)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(lines)

    def read(self) -> Chunk:
        """Returns the first records that wait. Broken lines count as read, and give none."""
        data = b""
        while b"\n" not in data:
            more = os.pread(self._descriptor, _READ_BYTES, self._start + len(data))
            data += more
            if not more:
                break
        whole = data.rfind(b"\n") + 1 or len(data)
        records = [record for line in data[:whole].splitlines() if (record := self._parse(line))]
        return Chunk(records, self._start + whole)

    def _parse(self, line: bytes) -> Record | None:
        try:
            number, tenant, kind, entry = orjson.loads(line)
            return Record(int(number), str(tenant), Kind(kind), str(entry))
        except ValueError as error:
            logger.warning("a line of the journal %s is broken and left out: %s", self._path, error)
            return None

    def forget(self, chunk: Chunk) -> None:
        """Drops what `read` returned; the file is emptied with its last record."""
        self._start = chunk.end
        if self._start >= self._end:
            os.ftruncate(self._descriptor, 0)
            self._start = self._end = 0

    def close(self) -> None:
        """Gives the file up: removes it when it is empty, else leaves it to whoever adopts it."""
        if self.empty:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def adopt(folder: Path) -> Iterator[Journal]:
    """Yields the journals of writers that are gone. They are this process' own until it closes them."""
    for path in sorted(folder.glob("*" + _SUFFIX)):
        try:
            descriptor = _lock(path, os.O_RDWR)
        except OSError as error:
            logger.warning("the journal %s cannot be opened: %s", path, error)
            continue
        if descriptor is not None:
            yield Journal(path, descriptor)


def _lock(path: Path, flags: int) -> int | None:
    """Opens and locks a file. Returns None when it is gone, or somebody else's."""
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # it was not removed meanwhile
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
