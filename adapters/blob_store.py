"""What a store of adapters' files does, whatever keeps them: a folder, or a bucket.

A blob is the files of one adapter under its digest, with a manifest beside them. It is there whole or not at
all, also after a crash, and never changes. Records are small JSON objects by path: the copy of what Redis
holds, from which a lost Redis is rebuilt. Digests come as bytes, so that no text from outside becomes a path.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from adapters.identity import DIGEST_BYTES

if TYPE_CHECKING:
    from adapters.s3_store import S3Store

MANIFEST_FILE = "manifest.json"
PIECE_BYTES = 1024 * 1024

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_RECORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*(/[A-Za-z0-9][A-Za-z0-9._@-]*)*")


class BlobNotFound(LookupError):
    """No blob has this digest."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(f"The blob store holds no adapter with the digest {digest.hex()}.")
        self.digest = digest


class StoreUnavailable(OSError):
    """The store cannot be reached, or refuses. One sentence, without secrets."""


class CorruptBlob(StoreUnavailable):
    """A manifest in the store cannot be read, or a file is not what its manifest says."""


class StoreRefused(StoreUnavailable):
    """The store refuses until its operator mends it: it does not exist, or takes no such credentials."""


class BlobReader(Protocol):
    """What an engine needs of a store. Safe for many threads."""

    def contains(self, digest: bytes) -> bool:
        """Whether the store has the blob."""
        ...

    def reading(self, digest: bytes) -> AbstractContextManager[Path]:
        """A local folder with the blob's files, which stays as it is inside the context.

        Blocks while a remote store's blob is fetched. Raises `BlobNotFound`, `StoreUnavailable`.
        """
        ...

    def has_local(self, digest: bytes) -> bool:
        """Whether `reading` needs no network."""
        ...

    def copies(self) -> Collection[bytes]:
        """The blobs that `discard` has something to free of."""
        ...

    def discard(self, digest: bytes) -> None:
        """Frees the local copy of a remote blob, if there is one and nobody reads it; blocks on the disk."""
        ...


class Staging(Protocol):
    """One upload's private folder. As a context manager it removes, on leaving, what was not published."""

    path: Path
    """Where the files go, before `publish`."""
    hashes: dict[str, str]
    """SHA-256 in hex of files whose bytes were hashed on their way here; `publish` hashes the others."""

    def __enter__(self) -> Staging: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def discard(self) -> None:
        """Removes what was not published; leaving the context does the same."""
        ...

    def publish(self, digest: bytes, manifest: Mapping[str, Any]) -> bool:
        """Makes the staged files the blob of `digest`, with `manifest` (JSON) beside them; atomic, durable.

        The caller has validated the files and computed `digest` from them. The manifest gets a field `files`:
        name → bytes and sha256. Where the store holds the digest already, what it says of it does not change
        and the staged files stay until the context ends; it takes as long as if there were none, so that
        nobody learns what others have uploaded.

        A blob that is damaged is whole again afterwards. The same files take the places of those that are
        there, whatever has become of them; others, which the same adapter may be written as, take the place
        of a blob whose manifest is damaged, or of which a file is missing or has another size. Returns
        whether the staged files are the blob, and were not before.
        """
        ...


class Trashed(Protocol):
    """A withdrawn blob."""

    @property
    def digest(self) -> bytes: ...

    def restore(self) -> None:
        """Brings the blob back, unless it has been published again meanwhile, or purged by somebody else."""
        ...

    def purge(self) -> None:
        """Frees its room; after `restore`, only what was not needed."""
        ...


class BlobStore(Protocol):
    """What a gateway needs of a store. Safe for many threads and processes at once; but blobs are withdrawn,
    restored and purged by one process at a time, which the collector's lock sees to.
    """

    scratch: Path
    """A local folder for uploads under way."""

    def stage(self) -> Staging:
        """A new private folder for one upload."""
        ...

    def contains(self, digest: bytes) -> bool: ...

    def manifest(self, digest: bytes) -> dict[str, Any]:
        """What was published beside the files. Raises `BlobNotFound`, `CorruptBlob`."""
        ...

    def chunks(self, digest: bytes, name: str) -> Generator[bytes, None, None]:
        """One file of a blob, in pieces; the last of them only when all are known to be what the manifest
        says. Raises `CorruptBlob` else, and `BlobNotFound`, also when the blob has no such file.
        """
        ...

    def copy_file(self, digest: bytes, name: str, target: Path) -> None:
        """Puts one file of a blob at `target`, which must not be written to. Raises `BlobNotFound`."""
        ...

    def digests(self) -> Iterator[bytes]:
        """Every blob, in no order."""
        ...

    def withdraw(self, digest: bytes) -> Trashed | None:
        """Moves a blob into the trash at once, to be restored or purged. None: there was no such blob."""
        ...

    def trashed(self) -> Sequence[Trashed]:
        """What is in the trash: on its way out now, or left by a crash."""
        ...

    def clean(self, older_than_s: float) -> int:
        """Removes what crashed uploads, untouched for `older_than_s` seconds, and crashed purges have left.
        Returns how many things.
        """
        ...

    def put_record(self, path: str, record: Mapping[str, Any]) -> None:
        """Writes a small JSON object, durably and at once; `path` is like ``names/acme/sql/3``."""
        ...

    def read_record(self, path: str) -> dict[str, Any] | None:
        """One record, or None if there is none. Raises ValueError for one that is damaged."""
        ...

    def list_records(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The records whose path begins with the folder `prefix`, with their paths. One that is damaged comes
        empty, so that it keeps nobody from the others.
        """
        ...

    def delete_record(self, path: str) -> None:
        """Removes a record; one that is not there is no error."""
        ...


def read_file(store: BlobStore, digest: bytes, name: str) -> bytes:
    """A small file of a blob: a config, a tokenizer. Raises `BlobNotFound`."""
    return b"".join(store.chunks(digest, name))


def is_remote(location: str) -> bool:
    """Whether `LORAPLEX_STORE` names a bucket."""
    return location.startswith("s3://")


def open_store(location: str, scratch: Path) -> BlobStore:
    """The store at a path or an ``s3://bucket/prefix``; `scratch` is used by remote stores alone.

    Raises ValueError for a URL that is none, OSError where a folder cannot be made.
    """
    if is_remote(location):
        return _open_bucket(location, scratch)
    from adapters.folder_store import FolderStore

    return FolderStore(Path(location))


def open_existing(location: str, scratch: Path) -> BlobStore:
    """The store at a location where there is one, to be read: nothing is made of a folder.

    Raises what `open_store` raises, and `StoreUnavailable` for a folder that is not there.
    """
    if is_remote(location):
        return _open_bucket(location, scratch)
    from adapters.folder_store import FolderStore

    check_present(Path(location))
    return FolderStore(Path(location), only_reads=True)


def open_reader(location: str, cache: Path, cache_bytes: int) -> BlobReader:
    """The store as an engine reads it, who makes no more of a folder than its root; `cache` and its size are
    used for remote stores alone.

    Raises what `open_store` raises, and OSError when another process has the cache.
    """
    if is_remote(location):
        from adapters.store_cache import StoreCache

        return StoreCache(_open_bucket(location, cache), cache, cache_bytes)
    from adapters.folder_store import FolderStore

    return FolderStore(Path(location), only_reads=True)


def _open_bucket(location: str, scratch: Path) -> S3Store:
    try:
        # Here, since who has a folder needs no S3 client.
        from adapters.s3_bucket import S3Objects
        from adapters.s3_store import S3Store
    except ImportError as error:
        raise StoreUnavailable(
            "An s3:// store needs the package obstore; install it with: pip install 'loraplex[s3]'"
        ) from error
    return S3Store(S3Objects.at(location), scratch)


def check_location(location: str) -> str:
    """`location`, if `open_store` can use it; raises ValueError that says what to write."""
    scheme, separator, rest = location.partition("://")
    if separator and scheme != "s3":
        raise ValueError(f"a store is a folder or s3://bucket/prefix, and {scheme[:20]}:// is neither")
    if separator and not _BUCKET.fullmatch(rest.partition("/")[0]):
        raise ValueError("an s3:// store names a bucket: s3://bucket/prefix")
    return location


def check_present(folder: Path) -> None:
    """Raises `StoreUnavailable` unless a folder is there that a gateway makes when it opens the store.

    When its volume is gone, files that are missing are not lost, and new ones must not go below the bare
    mount point.
    """
    if not folder.is_dir():
        raise StoreUnavailable(f"The store's folder {folder} is not there. Is its volume mounted?")


def hex_of(digest: bytes) -> str:
    """The digest as it stands in paths. Raises ValueError for anything else."""
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest is {DIGEST_BYTES} bytes")
    return digest.hex()


def digest_named(name: str) -> bytes | None:
    """The digest that is written so in a path; None for what others keep in the store, such as lost+found."""
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES else None


def check_record_path(path: str) -> str:
    """Returns `path` if it can name a record, or a folder of them; raises ValueError."""
    if _RECORD.fullmatch(path) is None:
        raise ValueError(f"{path!a} is no path of a record")
    return path


def is_intact(store: BlobStore, digest: bytes) -> bool:
    """Whether a store has a blob, and each file is what the manifest says. Reads all of them."""
    try:
        for name in store.manifest(digest)["files"]:
            for _ in store.chunks(digest, name):
                pass
    except (BlobNotFound, CorruptBlob, KeyError):
        return False
    return True


def parse_manifest(raw: bytes, name: str) -> dict[str, Any]:
    """A manifest, whose `files`, if it has any, are as `describe_files` has them. Raises `CorruptBlob`, with
    the name under which the store keeps it.
    """
    try:
        manifest = json.loads(raw)
        is_sound = isinstance(manifest, dict) and all(
            isinstance(about["bytes"], int) and isinstance(about["sha256"], str)
            for about in manifest.get("files", {}).values()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise CorruptBlob(f"The manifest {name} in the store is damaged.")
    return manifest


def verified(pieces: Iterable[bytes], sha256: str, fault: str) -> Iterator[bytes]:
    """The pieces, of which the last comes only when all of them have this hash. Raises `CorruptBlob` else."""
    sha = hashlib.sha256()
    last = b""
    for piece in pieces:
        if last:
            yield last
        sha.update(piece)
        last = piece
    if sha.hexdigest() != sha256:
        raise CorruptBlob(fault)
    if last:
        yield last


def corrupt_file(digest: bytes, name: str) -> str:
    """The fault of a file that is not what its manifest says."""
    return f"The file {name} of adapter {digest.hex()[:12]} in the store is corrupt."


def undamaged(raw: bytes) -> dict[str, Any]:
    """A record's JSON object; an empty one where it is none."""
    try:
        record = json.loads(raw)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def describe_files(folder: Path, hashes: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The manifest's `files` of a folder: name → bytes and sha256, computed where `hashes` has none."""
    return {
        file.name: {
            "bytes": file.stat().st_size,
            "sha256": hashes.get(file.name) or sha256_of(file),
        }
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST_FILE
    }


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hex; memory stays flat."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def last_touched(folder: Path) -> float:
    """The newest change of a file, or of a folder or a file in it; now, when it vanishes meanwhile."""
    try:
        entries = (folder, *folder.iterdir()) if folder.is_dir() else (folder,)
        return max(entry.stat().st_mtime for entry in entries)
    except FileNotFoundError:
        return time.time()
