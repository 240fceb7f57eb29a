"""Plain files beside the adapters' blobs: in the store's folder, or in its bucket.

    root/files/<tenant>/<name>      prefix/files/<tenant>/<name>

A file is there whole or not at all, and never changes. What it is, and whose, is in Redis; the store knows
its name only. Every method blocks, and is safe for many processes at once.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from adapters.blob_store import BlobStore, check_present, is_remote

if TYPE_CHECKING:
    from adapters.s3_bucket import S3Objects

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_ROOT = "files"
_HALF = "half-"
"""What is being written; a crash leaves it under this name, which nobody knows."""


class FileStore(Protocol):
    """Files by name, which is ``<tenant>/<name>``."""

    def put(self, name: str, source: Path) -> None:
        """Keeps a copy of a local file, durably. One of this name is replaced. Raises OSError."""
        ...

    def read(self, name: str, start: int, length: int) -> bytes:
        """So many bytes from ``start`` on, which must be in the file. Raises OSError, FileNotFoundError."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file; one that is not there is no error. Raises OSError."""
        ...

    def names(self) -> Iterator[tuple[str, float]]:
        """Every file, and when it was written (Unix time). Raises OSError."""
        ...


def open_files(location: str, store: BlobStore) -> FileStore:
    """The files of the store at ``location``, which `open_store` has opened as ``store``."""
    if is_remote(location):
        from adapters.s3_store import S3Store

        assert isinstance(store, S3Store)
        return BucketFiles(store.objects)
    return FolderFiles(Path(location) / _ROOT)


class FolderFiles:
    """Files below a folder, which is made if it is missing. See `FileStore`.

    Every method raises `StoreUnavailable` when the folder is no longer there, as when its volume has been
    unmounted: else each file would be taken for lost.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, source: Path) -> None:
        """See `FileStore`."""
        target = self._path(name)
        check_present(self._root)
        target.parent.mkdir(exist_ok=True)
        half = target.with_name(_HALF + secrets.token_hex(8))
        try:
            with source.open("rb") as read, half.open("xb") as written:
                shutil.copyfileobj(read, written, 1024 * 1024)
                written.flush()
                os.fsync(written.fileno())
            half.rename(target)
        finally:
            half.unlink(missing_ok=True)
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self, name: str, start: int, length: int) -> bytes:
        """See `FileStore`."""
        try:
            with self._path(name).open("rb") as file:
                file.seek(start)
                return file.read(length)
        except FileNotFoundError:
            check_present(self._root)
            raise

    def delete(self, name: str) -> None:
        """See `FileStore`."""
        check_present(self._root)
        self._path(name).unlink(missing_ok=True)

    def names(self) -> Iterator[tuple[str, float]]:
        """See `FileStore`. What a crash has left half written is among them."""
        check_present(self._root)
        for path in self._root.glob("*/*"):
            name = f"{path.parent.name}/{path.name}"
            if _NAME.fullmatch(name) is None:  # others' own, such as lost+found
                continue
            with suppress(FileNotFoundError):
                yield name, path.stat().st_mtime

    def _path(self, name: str) -> Path:
        return self._root / check_file_name(name)


class BucketFiles:
    """Files in a bucket. See `FileStore`; every method raises `StoreUnavailable`."""

    def __init__(self, objects: S3Objects) -> None:
        self._objects = objects

    def put(self, name: str, source: Path) -> None:
        """See `FileStore`."""
        self._objects.put_file(_key(name), source)

    def read(self, name: str, start: int, length: int) -> bytes:
        """See `FileStore`."""
        # No server has a range of nothing.
        return self._objects.get_range(_key(name), start, length) if length else b""

    def delete(self, name: str) -> None:
        """See `FileStore`."""
        self._objects.remove([_key(name)])

    def names(self) -> Iterator[tuple[str, float]]:
        """See `FileStore`."""
        for key, written in self._objects.list_keys(_ROOT):
            yield key.removeprefix(f"{_ROOT}/"), written


def check_file_name(name: str) -> str:
    """Returns ``name`` if it can be one, so that no text becomes a path elsewhere; raises ValueError."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!a} is no name of a file")
    return name


def _key(name: str) -> str:
    return f"{_ROOT}/{check_file_name(name)}"
