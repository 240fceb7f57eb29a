"""Adapters' files by digest, in a folder that gateways write and engines read.

    root/sha256/ab/<64 hex digits>/   adapter_config.json, adapter_model.safetensors, manifest.json
    root/staging/<random>/            uploads on their way; a folder here becomes a blob by one rename
    root/trash/<hex>.<random>/        blobs on their way out

A blob is there whole or not at all, also after a crash: files and folders reach the disk before the rename,
and the rename's own folder after it. Blobs never change. Digests come as bytes, so that no text from outside
becomes a path.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from adapters.identity import DIGEST_BYTES

MANIFEST_FILE = "manifest.json"

_PURGED = ".purged"
_FOLDER_MODE = 0o755
_FILE_MODE = 0o644


class BlobNotFound(LookupError):
    """No blob has this digest."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(f"The blob store holds no adapter with the digest {digest.hex()}.")
        self.digest = digest


class BlobStore:
    """The store under `root`, which is made if it is missing.
    Safe for many processes at once on one file system.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._blobs = root / "sha256"
        self._staging = root / "staging"
        self._trash = root / "trash"
        for folder in (self._blobs, self._staging, self._trash):
            folder.mkdir(parents=True, exist_ok=True)

    def stage(self) -> Staging:
        """A new private folder for one upload. Use it as a context
        manager: leaving it removes what was not published.
        """
        folder = self._staging / secrets.token_hex(16)
        folder.mkdir(mode=0o700)
        return Staging(self, folder)

    def path(self, digest: bytes) -> Path:
        """The folder of a blob. Raises `BlobNotFound`."""
        folder = self._folder(digest)
        if not folder.is_dir():
            raise BlobNotFound(digest)
        return folder

    def contains(self, digest: bytes) -> bool:
        return self._folder(digest).is_dir()

    def manifest(self, digest: bytes) -> dict[str, Any]:
        """What was published beside the files. Raises `BlobNotFound`."""
        return json.loads((self.path(digest) / MANIFEST_FILE).read_bytes())

    def delete(self, digest: bytes) -> None:
        """Removes a blob; one that is not there is no error."""
        trashed = self.withdraw(digest)
        if trashed is not None:
            trashed.purge()

    def withdraw(self, digest: bytes) -> Trashed | None:
        """Moves a blob into the trash at once, to be restored or purged. None: there was no such blob."""
        folder = self._folder(digest)
        trashed = self._trash / f"{digest.hex()}.{secrets.token_hex(8)}"
        try:
            folder.rename(trashed)
        except FileNotFoundError:
            return None
        _sync_folder(folder.parent)
        return Trashed(self, digest, trashed)

    def trashed(self) -> list[Trashed]:
        """What is in the trash: on its way out now, or left by a crash."""
        names = [folder.name for folder in self._trash.iterdir() if not folder.name.endswith(_PURGED)]
        return [Trashed(self, bytes.fromhex(name.partition(".")[0]), self._trash / name) for name in names]

    def clean(self, older_than_s: float) -> int:
        """Removes what crashed uploads, untouched for `older_than_s` seconds, and crashed purges have left.
        Returns how many folders.
        """
        limit = time.time() - older_than_s
        stale = [folder for folder in self._staging.iterdir() if _last_touched(folder) < limit]
        stale += self._trash.glob(f"*{_PURGED}")
        for folder in stale:
            shutil.rmtree(folder, ignore_errors=True)
        return len(stale)

    def _folder(self, digest: bytes) -> Path:
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
            raise ValueError(f"a digest is {DIGEST_BYTES} bytes")
        name = digest.hex()
        return self._blobs / name[:2] / name

    def _move_in(self, source: Path, digest: bytes) -> bool:
        """Makes `source` the blob of `digest` unless there is one. False: there was; `source` stays."""
        target = self._folder(digest)
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            _sync_folder(self._blobs)
        try:
            source.rename(target)
        except OSError:
            # Renaming onto a folder that holds files fails: somebody was faster, with the same content.
            if not target.is_dir():
                raise
            return False
        _sync_folder(target.parent)
        return True


@dataclass(frozen=True)
class Trashed:
    """A withdrawn blob."""

    _store: BlobStore
    digest: bytes
    _path: Path

    def restore(self) -> None:
        """Brings the blob back, unless it has been published again meanwhile, or purged by somebody else."""
        with suppress(FileNotFoundError):
            self._store._move_in(self._path, self.digest)

    def purge(self) -> None:
        """Frees its disk; after `restore`, only what was not needed."""
        # By its new name nobody can restore it, half removed.
        purged = self._path.with_name(self._path.name + _PURGED)
        with suppress(FileNotFoundError):
            self._path.rename(purged)
        shutil.rmtree(purged, ignore_errors=True)


class Staging:
    """One upload's folder; `path` is where its files go."""

    def __init__(self, store: BlobStore, path: Path) -> None:
        self._store = store
        self.path = path

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Removes what was not published; leaving the context does the same."""
        shutil.rmtree(self.path, ignore_errors=True)

    def publish(self, digest: bytes, manifest: Mapping[str, Any]) -> bool:
        """Makes the staged files the blob of `digest`, with
        `manifest` (JSON) beside them; atomic and durable.

        The caller has validated the files and computed `digest` from them. Where
        the store holds the digest, nothing changes and the staged files stay as
        they are until the context ends. Returns whether the blob is new.
        """
        if self._store.contains(digest):
            return False
        (self.path / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        for file in self.path.iterdir():
            file.chmod(_FILE_MODE)
            _sync(file, os.O_RDONLY)
        self.path.chmod(_FOLDER_MODE)
        _sync_folder(self.path)
        return self._store._move_in(self.path, digest)


def _last_touched(folder: Path) -> float:
    """The newest change of a staging folder or a file in it; now, when it vanishes meanwhile."""
    try:
        return max(entry.stat().st_mtime for entry in (folder, *folder.iterdir()))
    except FileNotFoundError:
        return time.time()


def _sync_folder(folder: Path) -> None:
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
