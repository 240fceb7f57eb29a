"""The store in a bucket of S3, or of anything that speaks its protocol.

    prefix/sha256/ab/<64 hex digits>/manifest.json          there: the blob is there, whole
    prefix/sha256/ab/<64 hex digits>/<generation>/<file>    written before it
    prefix/trash/<hex>.<random>.json                        manifests of withdrawn blobs
    prefix/records/….json

A bucket renames nothing, so what makes a blob is its manifest, written last and only where there is none
(a conditional put): of two uploads at once one wins, whole, and the other removes its own files. A manifest
names the generation of its files, so files of two uploads never meet; only those that are the same to the
byte are written over the first ones, and mend what has become of these. Files are verified by the manifest's
hashes when they are fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from adapters.blob_store import (
    MANIFEST_FILE,
    PIECE_BYTES,
    BlobNotFound,
    CorruptBlob,
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
from adapters.s3_bucket import S3Objects

_GENERATION = "generation"
_JSON = ".json"
_RECORDS_AT_ONCE = 16
_ORPHANS_AFTER_S = 24 * 3600.0
"""Files without a manifest are an upload's on its way, unless they are older."""
_ORPHANS_EVERY_S = 6 * 3600.0
"""They are looked for in the whole store, so not often."""


class S3Store:
    """The store among a bucket's objects: a `BlobStore`.

    Every method raises `StoreUnavailable` when the bucket does not answer as it should.
    """

    def __init__(self, objects: S3Objects, scratch: Path) -> None:
        self.objects = objects
        self.scratch = scratch / "uploads"
        self._staging = scratch / "staging"
        self._next_orphans = 0.0  # time.monotonic()
        for folder in (self.scratch, self._staging):
            folder.mkdir(parents=True, exist_ok=True)

    def stage(self) -> S3Staging:
        """A new private folder for one upload."""
        folder = self._staging / secrets.token_hex(16)
        folder.mkdir(mode=0o700)
        return S3Staging(self, folder)

    def contains(self, digest: bytes) -> bool:
        return self.objects.get(_manifest_key(digest)) is not None

    def manifest(self, digest: bytes) -> dict[str, Any]:
        """What was published beside the files. Raises `BlobNotFound`, `CorruptBlob`."""
        key = _manifest_key(digest)
        raw = self.objects.get(key)
        if raw is None:
            raise BlobNotFound(digest)
        return _parsed(raw, key)

    def chunks(self, digest: bytes, name: str) -> Generator[bytes, None, None]:
        """One file of a blob, in pieces, the last when all are verified.

        Raises `BlobNotFound`, `CorruptBlob`.
        """
        manifest = self.manifest(digest)
        if name not in manifest["files"]:
            raise BlobNotFound(digest)
        pieces = (
            bytes(part[start : start + PIECE_BYTES])
            for part in self._parts(digest, manifest, name)
            for start in range(0, len(part), PIECE_BYTES)
        )
        yield from verified(pieces, manifest["files"][name]["sha256"], corrupt_file(digest, name))

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
        for key, _ in self.objects.list_keys("sha256"):
            name, rest = _parts_of(key)
            digest = digest_named(name)
            if digest is not None and rest == [MANIFEST_FILE]:
                yield digest

    def withdraw(self, digest: bytes) -> S3Trashed | None:
        """Moves a blob's manifest into the trash, to be restored or purged. None: there was no such blob."""
        raw = self.objects.get(_manifest_key(digest))
        if raw is None:
            return None
        key = f"trash/{digest.hex()}.{secrets.token_hex(8)}{_JSON}"
        self.objects.put(key, raw)
        self.objects.remove([_manifest_key(digest)])
        return S3Trashed(self, digest, key)

    def trashed(self) -> list[S3Trashed]:
        """What is in the trash: on its way out now, or left by a crash."""
        keys = [key for key, _ in self.objects.list_keys("trash")]
        named = [(key, digest_named(key.removeprefix("trash/").partition(".")[0])) for key in keys]
        return [S3Trashed(self, digest, key) for key, digest in named if digest is not None]

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
        self.objects.put(_record_key(path), json.dumps(record, sort_keys=True).encode())

    def read_record(self, path: str) -> dict[str, Any] | None:
        """One record, or None if there is none."""
        raw = self.objects.get(_record_key(path))
        return None if raw is None else json.loads(raw)

    def list_records(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The records whose path begins with the folder `prefix`, with their paths; damaged ones empty."""
        keys = [key for key, _ in self.objects.list_keys(f"records/{check_record_path(prefix)}")]
        with ThreadPoolExecutor(_RECORDS_AT_ONCE, thread_name_prefix="s3-records") as pool:
            for key, raw in zip(keys, pool.map(self.objects.get, keys), strict=True):
                if raw is not None:
                    yield key.removeprefix("records/").removesuffix(_JSON), undamaged(raw)

    def delete_record(self, path: str) -> None:
        """Removes a record; one that is not there is no error."""
        self.objects.remove([_record_key(path)])

    def keys_of(self, digest: bytes, generation: str) -> list[str]:
        """The objects of one generation of a blob."""
        return [key for key, _ in self.objects.list_keys(f"{_blob_key(digest)}/{generation}")]

    def _remove_orphans(self, limit: float) -> int:
        """Removes generations older than `limit` that no manifest names: of uploads that crashed or lost."""
        generations: dict[str, dict[str, float]] = {}  # when each was written, by digest
        published: set[str] = set()
        for key, written in self.objects.list_keys("sha256"):
            name, rest = _parts_of(key)
            if not rest or digest_named(name) is None:  # others' own
                continue
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
            try:
                current = self._generation(digest)
            except CorruptBlob:  # it may name any of them
                continue
            for generation, written in of_blob.items():
                if written < limit and generation != current:
                    self.objects.remove(self.keys_of(digest, generation))
                    orphans += 1
        return orphans

    def _generation(self, digest: bytes) -> str | None:
        """The generation of a blob's files; None where there is no blob. Raises `CorruptBlob`."""
        try:
            return self.manifest(digest)[_GENERATION]
        except BlobNotFound:
            return None

    def _readable(self, digest: bytes) -> dict[str, Any]:
        """The manifest, or nothing where there is none that can be read."""
        try:
            return self.manifest(digest)
        except (BlobNotFound, CorruptBlob):
            return {}

    def _has_all(self, digest: bytes, manifest: Mapping[str, Any]) -> bool:
        """Whether every file of a manifest that can be read is there, with its size."""
        if not manifest:
            return False
        folder = f"{_blob_key(digest)}/{manifest[_GENERATION]}"
        sizes = self.objects.sizes(folder)
        return all(
            sizes.get(f"{folder}/{name}") == about["bytes"] for name, about in manifest["files"].items()
        )

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
        if sha.hexdigest() != manifest["files"][name]["sha256"]:
            raise CorruptBlob(corrupt_file(digest, name))

    def _parts(self, digest: bytes, manifest: Mapping[str, Any], name: str) -> Iterator[memoryview]:
        key = f"{_blob_key(digest)}/{manifest[_GENERATION]}/{name}"
        try:
            yield from self.objects.parts(key, manifest["files"][name]["bytes"])
        except FileNotFoundError:
            raise BlobNotFound(digest) from None


@dataclass(frozen=True)
class S3Trashed:
    """A withdrawn blob."""

    _store: S3Store
    digest: bytes
    _key: str

    def restore(self) -> None:
        """Brings the blob back, unless it has been published again meanwhile, or purged by somebody else."""
        raw = self._store.objects.get(self._key)
        if raw is not None:
            self._store.objects.put(_manifest_key(self.digest), raw, create=True)

    def purge(self) -> None:
        """Frees its room; after `restore`, only what was not needed."""
        raw = self._store.objects.get(self._key)
        if raw is not None:
            with suppress(CorruptBlob):  # nobody knows what it named, so `clean` finds that
                generation = _parsed(raw, self._key)[_GENERATION]
                if self._store._generation(self.digest) != generation:
                    self._store.objects.remove(self._store.keys_of(self.digest, generation))
            self._store.objects.remove([self._key])


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
        store, files = self._store, describe_files(self.path, self.hashes)
        described = store._readable(digest)
        is_same = described.get("files") == files
        if not is_same:
            described = {**manifest, _GENERATION: secrets.token_hex(8), "files": files}
        generation = described[_GENERATION]
        # What fails from here on leaves files that `clean` removes: to do so here may take as long to fail.
        for name in files:
            store.objects.put_file(f"{_blob_key(digest)}/{generation}/{name}", self.path / name)
        is_named = self._put_manifest(digest, described)
        if not is_named:
            store.objects.remove(store.keys_of(digest, generation))
        return is_named and not is_same

    def _put_manifest(self, digest: bytes, manifest: Mapping[str, Any]) -> bool:
        """Writes it where there is none, or one whose files are not all there. Returns whether it, or one of
        the same generation, is there now.
        """
        store, key = self._store, _manifest_key(digest)
        raw = json.dumps(manifest, indent=2, sort_keys=True).encode()
        if store.objects.put(key, raw, create=True):
            return True
        found = store._readable(digest)
        # Where an answer was lost, the retry is refused by the manifest that the first try has written.
        if found.get(_GENERATION) == manifest[_GENERATION]:
            return True
        return not store._has_all(digest, found) and store.objects.put(key, raw)


def _blob_key(digest: bytes) -> str:
    name = hex_of(digest)
    return f"sha256/{name[:2]}/{name}"


def _manifest_key(digest: bytes) -> str:
    return f"{_blob_key(digest)}/{MANIFEST_FILE}"


def _record_key(path: str) -> str:
    return f"records/{check_record_path(path)}{_JSON}"


def _parsed(raw: bytes, key: str) -> dict[str, Any]:
    """A manifest, which lists its files and says where they are. Raises `CorruptBlob`."""
    manifest = parse_manifest(raw, key)
    generation = manifest.get(_GENERATION)
    if "files" not in manifest or not isinstance(generation, str) or not generation.isalnum():
        raise CorruptBlob(f"The manifest {key} in the store is damaged.")
    return manifest


def _parts_of(key: str) -> tuple[str, list[str]]:
    """The name of the blob that a key below sha256/ belongs to, and what follows it."""
    _, _, *parts = key.split("/")
    return (parts[0], parts[1:]) if parts else ("", [])
