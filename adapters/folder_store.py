"""The store in a folder that gateways write and engines read.

    root/sha256/ab/<64 hex digits>/   the adapter's files, manifest.json
    root/staging/<random>/            uploads on their way; a folder here becomes a blob by one rename
    root/trash/<hex>.<random>/        blobs on their way out
    root/records/…/<name>.json        what Redis holds, as far as it is to survive Redis
    root/uploads/<tenant>/<random>/   uploads that may be resumed

Files and folders reach the disk before the rename that makes them a blob, and the rename's own folder
after it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from adapters.blob_store import (
    MANIFEST_FILE,
    PIECE_BYTES,
    BlobNotFound,
    CorruptBlob,
    check_present,
    check_record_path,
    corrupt_file,
    describe_files,
    digest_named,
    hex_of,
    last_touched,
    parse_manifest,
    undamaged,
    verified,
)

_PURGED = ".purged"
_RECORD_SUFFIX = ".json"
_FOLDER_MODE = 0o755
_FILE_MODE = 0o644


class FolderStore:
    """The store under `root`, which is made if it is missing: a `BlobStore` and a `BlobReader`.
    Safe for many processes at once on one file system.

    Methods raise `StoreUnavailable` when what they need below the root is not there, as with a volume that is
    not mounted any more; or not yet, for a reader, which makes nothing below the root.
    """

    def __init__(self, root: Path, *, only_reads: bool = False) -> None:
        self._root = root
        self._blobs = root / "sha256"
        self._staging = root / "staging"
        self._trash = root / "trash"
        self._records = root / "records"
        self.scratch = root / "uploads"
        root.mkdir(parents=True, exist_ok=True)
        if not only_reads:
            for folder in (self._blobs, self._staging, self._trash, self._records, self.scratch):
                folder.mkdir(exist_ok=True)

    def stage(self) -> FolderStaging:
        """A new private folder for one upload."""
        check_present(self._staging)
        folder = self._staging / secrets.token_hex(16)
        folder.mkdir(mode=0o700)
        return FolderStaging(self, folder)

    def path(self, digest: bytes) -> Path:
        """The folder of a blob. Raises `BlobNotFound`."""
        folder = self._folder(digest)
        if not folder.is_dir():
            raise self._not_found(digest)
        return folder

    @contextmanager
    def reading(self, digest: bytes) -> Iterator[Path]:
        """The folder of a blob. Raises `BlobNotFound`."""
        yield self.path(digest)

    def contains(self, digest: bytes) -> bool:
        is_here = self._folder(digest).is_dir()
        if not is_here:
            check_present(self._blobs)
        return is_here

    def has_local(self, digest: bytes) -> bool:
        """Whether there is such a blob: all of them are here."""
        return self.contains(digest)

    def copies(self) -> tuple[bytes, ...]:
        """None: blobs are read where they lie."""
        return ()

    def discard(self, digest: bytes) -> None:
        """Nothing: there are no copies of blobs."""

    def manifest(self, digest: bytes) -> dict[str, Any]:
        """What was published beside the files. Raises `BlobNotFound`, `CorruptBlob`."""
        file = self.path(digest) / MANIFEST_FILE
        name = str(file.relative_to(self._root))
        try:
            return parse_manifest(file.read_bytes(), name)
        except FileNotFoundError:
            raise CorruptBlob(f"The manifest {name} in the store is missing.") from None

    def chunks(self, digest: bytes, name: str) -> Generator[bytes, None, None]:
        """One file of a blob, in pieces, the last when all are verified: but for blobs that were published
        before manifests listed files.

        Raises `CorruptBlob`, and `BlobNotFound`, also when the blob has no such file.
        """
        file = self._file(digest, name)
        listed = self.manifest(digest).get("files", {})
        pieces = self._pieces(digest, file)
        if name in listed:
            pieces = verified(pieces, listed[name]["sha256"], corrupt_file(digest, name))
        yield from pieces

    def _pieces(self, digest: bytes, path: Path) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    yield piece
        except FileNotFoundError:
            raise self._not_found(digest) from None

    def copy_file(self, digest: bytes, name: str, target: Path) -> None:
        """Puts one file of a blob at `target`: the same file by another name. Raises `BlobNotFound`."""
        try:
            os.link(self._file(digest, name), target)
        except FileNotFoundError:
            raise self._not_found(digest) from None

    def digests(self) -> Iterator[bytes]:
        """Every blob, in no order."""
        check_present(self._blobs)
        for folder in self._blobs.glob("*/*"):
            if (digest := digest_named(folder.name)) is not None:
                yield digest

    def withdraw(self, digest: bytes) -> FolderTrashed | None:
        """Moves a blob into the trash at once, to be restored or purged. None: there was no such blob."""
        folder = self._folder(digest)
        trashed = self._trash / f"{digest.hex()}.{secrets.token_hex(8)}"
        try:
            folder.rename(trashed)
        except FileNotFoundError:
            check_present(self._trash)
            return None
        _sync_folder(folder.parent)
        return FolderTrashed(self, digest, trashed)

    def trashed(self) -> list[FolderTrashed]:
        """What is in the trash: on its way out now, or left by a crash."""
        found = [folder for folder in self._trash.iterdir() if not folder.name.endswith(_PURGED)]
        named = [(folder, digest_named(folder.name.partition(".")[0])) for folder in found]
        return [FolderTrashed(self, digest, folder) for folder, digest in named if digest is not None]

    def clean(self, older_than_s: float) -> int:
        """Removes what crashed uploads, untouched for `older_than_s` seconds, and crashed purges have left.
        Returns how many things.
        """
        limit = time.time() - older_than_s
        stale = [folder for folder in self._staging.iterdir() if last_touched(folder) < limit]
        stale += self._trash.glob(f"*{_PURGED}")
        for folder in stale:
            shutil.rmtree(folder, ignore_errors=True)
        half = [file for file in self._records.rglob(".*") if last_touched(file) < limit]
        for file in half:
            file.unlink(missing_ok=True)
        return len(stale) + len(half)

    def put_record(self, path: str, record: Mapping[str, Any]) -> None:
        """Writes a small JSON object, durably and at once; `path` is like ``names/acme/sql/3``."""
        target = self._record(path)
        check_present(self._records)
        target.parent.mkdir(parents=True, exist_ok=True)
        # A name that no record has, so that a reader sees the old one or the new one.
        written = target.with_name(f".{secrets.token_hex(8)}")
        written.write_text(json.dumps(record, sort_keys=True) + "\n")
        _sync(written, os.O_RDONLY)
        written.rename(target)
        _sync_folder(target.parent)

    def read_record(self, path: str) -> dict[str, Any] | None:
        """One record, or None if there is none."""
        try:
            return json.loads(self._record(path).read_bytes())
        except FileNotFoundError:
            check_present(self._records)
            return None

    def list_records(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The records whose path begins with the folder `prefix`, with their paths; damaged ones empty."""
        check_present(self._records)
        for file in (self._records / check_record_path(prefix)).rglob(f"[!.]*{_RECORD_SUFFIX}"):
            with suppress(FileNotFoundError):  # deleted since it was listed
                record = undamaged(file.read_bytes())
                yield str(file.relative_to(self._records)).removesuffix(_RECORD_SUFFIX), record

    def delete_record(self, path: str) -> None:
        """Removes a record; one that is not there is no error."""
        target = self._record(path)
        check_present(self._records)
        with suppress(FileNotFoundError):
            target.unlink()
            _sync_folder(target.parent)

    def _not_found(self, digest: bytes) -> BlobNotFound:
        """What to raise for a blob that is not there. Raises `StoreUnavailable` when nothing is."""
        check_present(self._blobs)
        return BlobNotFound(digest)

    def _record(self, path: str) -> Path:
        return self._records / (check_record_path(path) + _RECORD_SUFFIX)

    def _folder(self, digest: bytes) -> Path:
        name = hex_of(digest)
        return self._blobs / name[:2] / name

    def _file(self, digest: bytes, name: str) -> Path:
        if name in ("", ".", "..") or "/" in name:
            raise ValueError(f"{name!a} is no name of a file")
        return self._folder(digest) / name

    def _move_in(self, source: Path, digest: bytes) -> bool:
        """Makes `source` the blob of `digest` unless there is one. False: there was; `source` stays."""
        target = self._folder(digest)
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            _sync_folder(self._blobs)
        try:
            source.rename(target)
        except OSError as error:
            # Renaming onto a folder that holds files fails: somebody was faster, with the same content,
            # which may be gone again by now.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and not target.is_dir():
                raise
            return False
        _sync_folder(target.parent)
        return True

    def _mend(self, digest: bytes, built: Path, files: Mapping[str, Any]) -> bool | None:
        """Makes the blob of `digest`, which is there, whole again. `files` describes those in `built`, which
        may be gone from there afterwards. Returns whether `built` has taken its place. None: the blob was
        taken away meanwhile.
        """
        folder = self._folder(digest)
        try:
            # By its descriptor, since another may have its name at any time, with other files.
            with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as found:
                listed = _listed_in(found)
                if listed == files:
                    # Whoever reads meanwhile, reads the same. A look at what is there would take longer than
                    # none; to free it, which no sync is to wait for, is left to whoever removes `built`.
                    for name in files:
                        with suppress(FileNotFoundError):
                            os.link(name, built / f".{name}", src_dir_fd=found)
                        os.rename(built / name, name, dst_dir_fd=found)
                    os.fsync(found)
                elif not listed or not _have_their_sizes(found, listed):
                    while not self._move_in(built, digest):
                        aside = self._staging / secrets.token_hex(16)
                        with suppress(FileNotFoundError):  # somebody else mends it, too
                            folder.rename(aside)
                        shutil.rmtree(aside, ignore_errors=True)
                    return True
                if os.path.samestat(os.fstat(found), folder.stat()):
                    return False
        except OSError as error:
            # ESTALE is what NFS says of an open folder that another machine has removed.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        return None


@dataclass(frozen=True)
class FolderTrashed:
    """A withdrawn blob."""

    _store: FolderStore
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


@dataclass
class FolderStaging:
    """One upload's folder; `path` is where its files go."""

    _store: FolderStore
    path: Path
    hashes: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> FolderStaging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Removes what was not published; leaving the context does the same."""
        shutil.rmtree(self.path, ignore_errors=True)

    def publish(self, digest: bytes, manifest: Mapping[str, Any]) -> bool:
        """Makes the staged files the blob of `digest`, with `manifest` beside them; see `Staging`."""
        described = {**manifest, "files": describe_files(self.path, self.hashes)}
        while (is_new := self._publish(digest, described)) is None:
            pass
        return is_new

    def _publish(self, digest: bytes, described: Mapping[str, Any]) -> bool | None:
        """Publishes once. None: what was there, and kept these files out, was taken away meanwhile."""
        # The same files in a second folder: the first stays, so that it can be published again.
        built = self._store.stage().path
        try:
            for name in described["files"]:
                os.link(self.path / name, built / name)
            (built / MANIFEST_FILE).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
            for file in built.iterdir():
                file.chmod(_FILE_MODE)
                _sync(file, os.O_RDONLY)
            built.chmod(_FOLDER_MODE)
            _sync_folder(built)
            return self._store._move_in(built, digest) or self._store._mend(digest, built, described["files"])
        finally:
            shutil.rmtree(built, ignore_errors=True)


def _listed_in(folder: int) -> Mapping[str, Any]:
    """The files that the manifest in an open folder lists: none where it is missing or damaged."""
    try:
        with open(os.open(MANIFEST_FILE, os.O_RDONLY, dir_fd=folder), "rb") as file:
            return parse_manifest(file.read(), MANIFEST_FILE).get("files", {})
    except (FileNotFoundError, CorruptBlob):
        return {}


def _have_their_sizes(folder: int, listed: Mapping[str, Any]) -> bool:
    try:
        return all(os.stat(name, dir_fd=folder).st_size == about["bytes"] for name, about in listed.items())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    with _opened(path, flags) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
