"""Copies of a remote store's blobs on an engine's local disk: bounded, verified, fetched once at a time.

    folder/blobs/<64 hex digits>/    a blob's files and manifest, whole: a folder gets this name by one rename
    folder/incoming/<random>/        on its way in, or out
    folder/lock                      held by the process that uses the folder

An entry found at the start is not believed: its files are hashed before they are read for the first time, and
after a reader failed on them. What is not as its manifest says, or was removed by others, is fetched again.
Where the disk is full before the bound is reached, what was used longest ago makes room.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adapters.blob_store import MANIFEST_FILE, hex_of, sha256_of

logger = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class RemoteStore(Protocol):
    """What the cache needs of the store behind it."""

    def contains(self, digest: bytes) -> bool: ...

    def manifest(self, digest: bytes) -> dict[str, Any]: ...

    def fetch(self, digest: bytes, folder: Path) -> dict[str, Any]:
        """Fetches all files of a blob into `folder`, verified, and its manifest as the last. Returns that."""
        ...


@dataclass(slots=True)
class _Entry:
    nbytes: int
    verified: bool
    readers: int = 0


class StoreCache:
    """A `BlobReader` of a remote store. Safe for many threads of one process.

    Args:
        folder: made if it is missing; for this process alone.
        max_bytes: what all copies may take together. A blob that is larger is refused; one for which there
            is no room while others are read waits for these.

    Raises:
        OSError: another process uses the folder, or it cannot be made.
    """

    def __init__(self, store: RemoteStore, folder: Path, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._blobs = folder / "blobs"
        self._incoming = folder / "incoming"
        self._changed = threading.Condition()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._filling: set[bytes] = set()
        self._reserved = 0  # bytes of blobs on their way in
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(folder)
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir()
        self._take_stock()

    @property
    def nbytes(self) -> int:
        """What the copies take, those on their way in included."""
        with self._changed:
            return self._used()

    def contains(self, digest: bytes) -> bool:
        """Whether the blob is here, or in the store behind. Raises `StoreUnavailable`."""
        return self.has_local(digest) or self._store.contains(digest)

    def has_local(self, digest: bytes) -> bool:
        """Whether a copy is here."""
        with self._changed:
            return digest in self._entries

    def copies(self) -> list[bytes]:
        """The blobs that are here."""
        with self._changed:
            return list(self._entries)

    @contextmanager
    def reading(self, digest: bytes) -> Iterator[Path]:
        """The folder of the local copy, which stays inside the context; fetches it first if need be.

        Raises `BlobNotFound`; OSError when the store or the disk fails, or the blob is larger than the cache.
        """
        folder = self._folder(digest)
        entry = self._pin(digest)
        try:
            yield folder
        except BaseException:
            entry.verified = False
            raise
        finally:
            self._unpin(entry)

    def discard(self, digest: bytes) -> None:
        """Frees the copy, if there is one and nobody reads it. Blocks on the disk."""
        with self._changed:
            entry = self._entries.get(digest)
            if entry is None or entry.readers or digest in self._filling:
                return
            out = self._take_out(digest)
        shutil.rmtree(out, ignore_errors=True)

    def close(self) -> None:
        """Lets another process use the folder."""
        os.close(self._lock)

    def _pin(self, digest: bytes) -> _Entry:
        """The entry with one more reader. One caller fetches or verifies, others wait for it."""
        while True:
            with self._changed:
                while digest in self._filling:
                    self._changed.wait()
                entry = self._entries.get(digest)
                if entry is not None and entry.verified:
                    entry.readers += 1
                    self._entries.move_to_end(digest)
                    with suppress(OSError):  # if it is gone, its reader fails, and it is fetched again
                        os.utime(self._folder(digest))  # the order of use, for the next start
                    return entry
                self._filling.add(digest)
            try:
                if entry is not None:
                    self._verify(digest, entry)
                else:
                    self._fetch(digest)
            finally:
                with self._changed:
                    self._filling.discard(digest)
                    self._changed.notify_all()

    def _unpin(self, entry: _Entry) -> None:
        with self._changed:
            entry.readers -= 1
            self._changed.notify_all()

    def _verify(self, digest: bytes, entry: _Entry) -> None:
        """Believes an entry, or takes it out, to be fetched again."""
        if _is_intact(self._folder(digest)):
            entry.verified = True
            return
        logger.warning("the copy of adapter %s on disk is corrupt; fetching it again", digest.hex()[:12])
        with self._changed:
            while entry.readers:
                self._changed.wait()
            out = self._take_out(digest)
        shutil.rmtree(out, ignore_errors=True)

    def _fetch(self, digest: bytes) -> None:
        nbytes = _size_of(self._store.manifest(digest))
        self._make_room(nbytes, digest)
        incoming: Path | None = None
        try:
            incoming = self._bring(digest)
        finally:
            with self._changed:
                self._reserved -= nbytes
                if incoming is not None:
                    self._blobs.mkdir(parents=True, exist_ok=True)  # others may have cleared the disk
                    incoming.rename(self._folder(digest))
                    self._entries[digest] = _Entry(nbytes, verified=True)
                self._changed.notify_all()

    def _bring(self, digest: bytes) -> Path:
        """Fetches a blob into a folder of its own. Copies go as long as the disk has no room for it."""
        while True:
            incoming = self._incoming / secrets.token_hex(16)
            try:
                incoming.mkdir(parents=True)
                self._store.fetch(digest, incoming)
            except BaseException as error:
                shutil.rmtree(incoming, ignore_errors=True)
                if not isinstance(error, OSError) or error.errno not in _NO_ROOM or not self._drop_oldest():
                    raise
                logger.warning(
                    "the cache's disk is full before --store-cache-bytes are; a copy goes for adapter %s",
                    digest.hex()[:12],
                )
            else:
                return incoming

    def _drop_oldest(self) -> bool:
        """Removes the copy that was used longest ago. False: all that there are have readers."""
        with self._changed:
            victim = self._victim()
            out = None if victim is None else self._take_out(victim)
        if out is None:
            return False
        shutil.rmtree(out, ignore_errors=True)
        return True

    def _make_room(self, nbytes: int, digest: bytes) -> None:
        """Reserves room, at the cost of what was used longest ago; waits while all else is read."""
        if nbytes > self._max_bytes:
            raise OSError(
                f"the adapter {digest.hex()[:12]} takes {nbytes:,} bytes, but the local cache may have "
                f"{self._max_bytes:,}; start the engine with a larger --store-cache-bytes"
            )
        removed: list[Path] = []
        with self._changed:
            while self._used() + nbytes > self._max_bytes:
                victim = self._victim()
                if victim is None:
                    self._changed.wait()
                else:
                    removed.append(self._take_out(victim))
            self._reserved += nbytes
        for folder in removed:
            shutil.rmtree(folder, ignore_errors=True)

    def _victim(self) -> bytes | None:
        free = (
            digest
            for digest, entry in self._entries.items()
            if not entry.readers and digest not in self._filling
        )
        return next(free, None)

    def _take_out(self, digest: bytes) -> Path:
        """Takes an entry out, by one rename; its folder is the caller's to remove. Holds the lock."""
        del self._entries[digest]
        out = self._incoming / secrets.token_hex(16)
        self._incoming.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # others have removed it
            self._folder(digest).rename(out)
        return out

    def _used(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values()) + self._reserved

    def _folder(self, digest: bytes) -> Path:
        return self._blobs / hex_of(digest)

    def _take_stock(self) -> None:
        """Takes in what an earlier process left, least recently used first, as far as there is room."""
        for folder in sorted(self._blobs.iterdir(), key=lambda folder: folder.stat().st_mtime):
            try:
                nbytes = _size_of(json.loads((folder / MANIFEST_FILE).read_bytes()))
                self._entries[bytes.fromhex(folder.name)] = _Entry(nbytes, verified=False)
            except (OSError, ValueError, KeyError, TypeError):
                shutil.rmtree(folder, ignore_errors=True)
        while self._entries and self._used() > self._max_bytes:
            shutil.rmtree(self._take_out(next(iter(self._entries))), ignore_errors=True)


def _take_lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(
            f"another engine uses the cache {folder}; give each its own folder with --store-cache"
        ) from None
    return descriptor


def _size_of(manifest: Mapping[str, Any]) -> int:
    return sum(file["bytes"] for file in manifest["files"].values())


def _is_intact(folder: Path) -> bool:
    """Whether the files are those of the manifest beside them."""
    try:
        files = json.loads((folder / MANIFEST_FILE).read_bytes())["files"]
        return all(
            (folder / name).stat().st_size == file["bytes"] and sha256_of(folder / name) == file["sha256"]
            for name, file in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
