"""The store in a bucket of S3, or of anything that speaks its protocol.

    prefix/sha256/ab/<64 hex digits>/manifest.json          there: the blob is there, whole
    prefix/sha256/ab/<64 hex digits>/<generation>/<file>    written before it
    prefix/trash/<hex>.<random>.json                        manifests of withdrawn blobs
    prefix/records/….json

A bucket renames nothing, so what makes a blob is its manifest, written last and only where there is none
(a conditional put): of two uploads at once one wins, whole, and the other removes its own files. A manifest
names the generation of its files, so files of two uploads never meet. Files are verified by the manifest's
hashes when they are fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store as Bucket

from adapters.blob_store import (
    MANIFEST_FILE,
    PIECE_BYTES,
    BlobNotFound,
    StoreUnavailable,
    check_record_path,
    describe_files,
    hex_of,
    last_touched,
)

_GENERATION = "generation"
_JSON = ".json"
_CLOSED_MEANWHILE = "connection was not ready"
_NO_BUCKET = "NoSuchBucket"
_PART_BYTES = 16 * 1024 * 1024
_PARTS_AT_ONCE = 4
_RECORDS_AT_ONCE = 16
_RETRY_S = 20.0
_REQUEST_S = 120.0
"""A part of 16 MiB in less: anything slower is a fault."""
_ORPHANS_AFTER_S = 24 * 3600.0
"""Files without a manifest are an upload's on its way, unless they are older."""
_ORPHANS_EVERY_S = 6 * 3600.0
"""They are looked for in the whole store, so not often."""

T = TypeVar("T")


class CorruptBlob(StoreUnavailable):
    """A file of the store is not what its manifest says."""


class S3Store:
    """The store under a prefix of a bucket: a `BlobStore`. Credentials, region and endpoint come from AWS'
    own variables, or from the machine's role.

    Every method raises `StoreUnavailable` when the bucket does not answer as it should.
    """

    def __init__(self, bucket: Bucket, scratch: Path) -> None:
        self.bucket = bucket
        self.scratch = scratch / "uploads"
        self._staging = scratch / "staging"
        self._next_orphans = 0.0  # time.monotonic()
        for folder in (self.scratch, self._staging):
            folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def from_url(cls, url: str, scratch: Path) -> S3Store:
        """The store at ``s3://bucket/prefix``. Does not connect."""
        name, _, prefix = url.removeprefix("s3://").partition("/")
        with _clear_faults():
            bucket = Bucket(
                name,
                prefix=prefix.strip("/") or None,
                # Whether HTTP is right is the endpoint's question, and the operator has answered it.
                client_options={"allow_http": True, "timeout": timedelta(seconds=_REQUEST_S)},
                retry_config={"max_retries": 8, "retry_timeout": timedelta(seconds=_RETRY_S)},
            )
        return cls(bucket, scratch)

    def stage(self, files: Path | None = None) -> S3Staging:
        """A new private folder for one upload; `files`, a folder under `scratch`, moves and becomes it.

        Raises FileNotFoundError when `files` is gone.
        """
        folder = self._staging / secrets.token_hex(16)
        if files is None:
            folder.mkdir(mode=0o700)
        else:
            os.utime(files)  # however long ago they came, `clean` is to leave them
            files.rename(folder)
        return S3Staging(self, folder)

    def contains(self, digest: bytes) -> bool:
        return self.get(_manifest_key(digest)) is not None

    def manifest(self, digest: bytes) -> dict[str, Any]:
        """What was published beside the files. Raises `BlobNotFound`."""
        raw = self.get(_manifest_key(digest))
        if raw is None:
            raise BlobNotFound(digest)
        return json.loads(raw)

    def chunks(self, digest: bytes, name: str) -> Iterator[bytes]:
        """One file of a blob, in pieces, verified at its end. Raises `BlobNotFound`, `CorruptBlob`."""
        manifest = self.manifest(digest)
        if name not in manifest["files"]:
            raise BlobNotFound(digest)
        sha = hashlib.sha256()
        for part in self._parts(digest, manifest, name):
            sha.update(part)
            for start in range(0, len(part), PIECE_BYTES):
                yield bytes(part[start : start + PIECE_BYTES])
        _check_hash(digest, manifest, name, sha.hexdigest())

    def copy_file(self, digest: bytes, name: str, target: Path) -> None:
        """Fetches one file of a blob to `target`, verified. Raises `BlobNotFound`, `CorruptBlob`."""
        self._fetch_file(digest, self.manifest(digest), name, target)

    def fetch(self, digest: bytes, folder: Path) -> dict[str, Any]:
        """Fetches all files of a blob into `folder`, verified, and its manifest as the last. Returns that.

        Raises `BlobNotFound`, `CorruptBlob`.
        """
        manifest = self.manifest(digest)
        for name in manifest["files"]:
            self._fetch_file(digest, manifest, name, folder / name)
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        return manifest

    def digests(self) -> Iterator[bytes]:
        """Every blob, in no order."""
        for key, _ in self._list("sha256"):
            if key.count("/") == 3 and key.endswith("/" + MANIFEST_FILE):
                yield bytes.fromhex(key.split("/")[2])

    def withdraw(self, digest: bytes) -> S3Trashed | None:
        """Moves a blob's manifest into the trash, to be restored or purged. None: there was no such blob."""
        raw = self.get(_manifest_key(digest))
        if raw is None:
            return None
        key = f"trash/{digest.hex()}.{secrets.token_hex(8)}{_JSON}"
        self.put(key, raw)
        self.remove([_manifest_key(digest)])
        return S3Trashed(self, digest, key)

    def trashed(self) -> list[S3Trashed]:
        """What is in the trash: on its way out now, or left by a crash."""
        keys = [key for key, _ in self._list("trash")]
        return [
            S3Trashed(self, bytes.fromhex(key.removeprefix("trash/").partition(".")[0]), key) for key in keys
        ]

    def clean(self, older_than_s: float) -> int:
        """Removes what crashed uploads, untouched for `older_than_s` seconds, have left here and in the
        bucket. Returns how many things.
        """
        limit = time.time() - older_than_s
        stale = [folder for folder in self._staging.iterdir() if last_touched(folder) < limit]
        for folder in stale:
            shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() < self._next_orphans:
            return len(stale)
        self._next_orphans = time.monotonic() + _ORPHANS_EVERY_S
        return len(stale) + self._remove_orphans(limit - _ORPHANS_AFTER_S)

    def put_record(self, path: str, record: Mapping[str, Any]) -> None:
        """Writes a small JSON object, durably and at once; `path` is like ``names/acme/sql/3``."""
        self.put(_record_key(path), json.dumps(record, sort_keys=True).encode())

    def read_record(self, path: str) -> dict[str, Any] | None:
        """One record, or None if there is none."""
        raw = self.get(_record_key(path))
        return None if raw is None else json.loads(raw)

    def list_records(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The records whose path begins with the folder `prefix`, with their paths."""
        keys = [key for key, _ in self._list(f"records/{check_record_path(prefix)}")]
        with ThreadPoolExecutor(_RECORDS_AT_ONCE, thread_name_prefix="s3-records") as pool:
            for key, raw in zip(keys, pool.map(self.get, keys), strict=True):
                if raw is not None:
                    yield key.removeprefix("records/").removesuffix(_JSON), json.loads(raw)

    def delete_record(self, path: str) -> None:
        """Removes a record; one that is not there is no error."""
        self.remove([_record_key(path)])

    def get(self, key: str) -> bytes | None:
        """A small object, or None if there is none."""
        with _clear_faults():
            try:
                return bytes(_again(lambda: obstore.get(self.bucket, key).bytes()))
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):
                    raise
                return None

    def put(self, key: str, data: bytes, *, create: bool = False) -> bool:
        """Writes a small object. False: it is there already, where `create` asks that it be new."""
        with _clear_faults():
            try:
                _again(lambda: obstore.put(self.bucket, key, data, mode="create" if create else "overwrite"))
            except AlreadyExistsError:
                return False
            return True

    def put_file(self, key: str, path: Path) -> None:
        """Writes an object from a file, in parts; it is there whole or not at all."""
        with _clear_faults():
            _again(
                lambda: obstore.put(
                    self.bucket, key, path, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
                )
            )

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """So many bytes of an object. Raises FileNotFoundError when there is none."""
        with _clear_faults():
            try:
                return bytes(
                    _again(lambda: obstore.get_range(self.bucket, key, start=start, end=start + length))
                )
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):
                    raise
        raise FileNotFoundError(key)

    def list_keys(self, prefix: str) -> Iterator[tuple[str, float]]:
        """The objects under a folder, and when each was written."""
        return self._list(prefix)

    def remove(self, keys: Sequence[str]) -> None:
        """Removes objects; those that are not there are no error."""
        if keys:
            with _clear_faults():
                obstore.delete(self.bucket, list(keys))

    def keys_of(self, digest: bytes, generation: str) -> list[str]:
        """The objects of one generation of a blob."""
        return [key for key, _ in self._list(f"{_blob_key(digest)}/{generation}")]

    def _list(self, prefix: str) -> Iterator[tuple[str, float]]:
        """The objects under a folder, and when each was written."""
        with _clear_faults():
            for page in obstore.list(self.bucket, prefix):
                for item in page:
                    yield item["path"], item["last_modified"].timestamp()

    def _remove_orphans(self, limit: float) -> int:
        """Removes generations older than `limit` that no manifest names: of uploads that crashed or lost."""
        generations: dict[str, dict[str, float]] = {}  # when each was written, by digest
        published: set[str] = set()
        for key, written in self._list("sha256"):
            _, _, name, *rest = key.split("/")
            if rest == [MANIFEST_FILE]:
                published.add(name)
            else:
                of_blob = generations.setdefault(name, {})
                of_blob[rest[0]] = max(written, of_blob.get(rest[0], 0.0))
        in_trash = {trashed.digest.hex() for trashed in self.trashed()}
        orphans = 0
        for name, of_blob in generations.items():
            if name in in_trash or (name in published and len(of_blob) == 1):
                continue
            digest = bytes.fromhex(name)
            current = self._generation(digest)
            for generation, written in of_blob.items():
                if written < limit and generation != current:
                    self.remove(self.keys_of(digest, generation))
                    orphans += 1
        return orphans

    def _generation(self, digest: bytes) -> str | None:
        raw = self.get(_manifest_key(digest))
        return json.loads(raw)[_GENERATION] if raw is not None else None

    def _fetch_file(self, digest: bytes, manifest: Mapping[str, Any], name: str, target: Path) -> None:
        if name not in manifest["files"]:
            raise BlobNotFound(digest)
        sha = hashlib.sha256()
        with target.open("wb") as file:
            for part in self._parts(digest, manifest, name):
                sha.update(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        _check_hash(digest, manifest, name, sha.hexdigest())

    def _parts(self, digest: bytes, manifest: Mapping[str, Any], name: str) -> Iterator[memoryview]:
        """A file's bytes in order, a few parts fetched ahead; memory stays flat."""
        key = f"{_blob_key(digest)}/{manifest[_GENERATION]}/{name}"
        size = manifest["files"][name]["bytes"]

        def fetch(start: int) -> memoryview:
            end = min(start + _PART_BYTES, size)
            with _clear_faults():
                try:
                    return memoryview(
                        _again(lambda: obstore.get_range(self.bucket, key, start=start, end=end))
                    )
                except FileNotFoundError:
                    raise BlobNotFound(digest) from None

        starts = range(0, size, _PART_BYTES)
        with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="s3-fetch") as pool:
            pending = [pool.submit(fetch, start) for start in starts[:_PARTS_AT_ONCE]]
            for start in starts:
                yield pending.pop(0).result()
                ahead = start + _PARTS_AT_ONCE * _PART_BYTES
                if ahead < size:
                    pending.append(pool.submit(fetch, ahead))


@dataclass(frozen=True)
class S3Trashed:
    """A withdrawn blob."""

    _store: S3Store
    digest: bytes
    _key: str

    def restore(self) -> None:
        """Brings the blob back, unless it has been published again meanwhile, or purged by somebody else."""
        raw = self._store.get(self._key)
        if raw is not None:
            self._store.put(_manifest_key(self.digest), raw, create=True)

    def purge(self) -> None:
        """Frees its room; after `restore`, only what was not needed."""
        raw = self._store.get(self._key)
        if raw is not None:
            generation = json.loads(raw)[_GENERATION]
            if self._store._generation(self.digest) != generation:
                self._store.remove(self._store.keys_of(self.digest, generation))
            self._store.remove([self._key])


@dataclass
class S3Staging:
    """One upload's folder, on this machine; `path` is where its files go."""

    _store: S3Store
    path: Path
    hashes: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> S3Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Removes the folder; leaving the context does the same."""
        shutil.rmtree(self.path, ignore_errors=True)

    def publish(self, digest: bytes, manifest: Mapping[str, Any]) -> bool:
        """Makes the staged files the blob of `digest`, with `manifest` beside them; see `Staging`."""
        generation = secrets.token_hex(8)
        described = {
            **manifest,
            _GENERATION: generation,
            "files": describe_files(self.path, self.hashes),
        }
        written = False
        try:
            for name in described["files"]:
                self._store.put_file(f"{_blob_key(digest)}/{generation}/{name}", self.path / name)
            raw = json.dumps(described, indent=2, sort_keys=True).encode()
            # Where an answer was lost, the retry is refused by the manifest that the first try has written.
            written = (
                self._store.put(_manifest_key(digest), raw, create=True)
                or self._store._generation(digest) == generation
            )
            return written
        finally:
            if not written:
                with suppress(StoreUnavailable):  # then `clean` does it
                    self._store.remove(self._store.keys_of(digest, generation))


def _blob_key(digest: bytes) -> str:
    name = hex_of(digest)
    return f"sha256/{name[:2]}/{name}"


def _manifest_key(digest: bytes) -> str:
    return f"{_blob_key(digest)}/{MANIFEST_FILE}"


def _record_key(path: str) -> str:
    return f"records/{check_record_path(path)}{_JSON}"


def _check_hash(digest: bytes, manifest: Mapping[str, Any], name: str, found: str) -> None:
    if found != manifest["files"][name]["sha256"]:
        raise CorruptBlob(f"The file {name} of adapter {digest.hex()[:12]} in the store is corrupt.")


def _again(call: Callable[[], T]) -> T:
    """What the call returns. A kept connection that has been closed meanwhile is no fault that the client
    itself tries again, as it does others.
    """
    try:
        return call()
    except BaseError as error:
        if _CLOSED_MEANWHILE not in str(error):
            raise
        return call()


@contextmanager
def _clear_faults() -> Iterator[None]:
    """Turns what the client raises, which may quote whole requests and answers, into one sentence."""
    try:
        yield
    except (BaseError, OSError) as error:
        if _NO_BUCKET in str(error):
            raise StoreUnavailable("The bucket of the S3 store does not exist.") from error
        reason = str(error).partition("<?xml")[0].split("\n")[0][:300]
        raise StoreUnavailable(f"The S3 store does not answer as it should: {reason}") from error
