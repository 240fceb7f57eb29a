"""What becomes of a blob that the disk, or somebody with access to the store, has damaged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapters import s3_store
from adapters.blob_store import (
    MANIFEST_FILE,
    PIECE_BYTES,
    BlobStore,
    CorruptBlob,
    StoreUnavailable,
    is_intact,
    open_store,
    read_file,
)
from adapters.folder_store import FolderStore
from adapters.s3_store import S3Store
from tests.s3_server import BUCKET, S3Server

DIGEST = hashlib.sha256(b"one").digest()
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b"{}", WEIGHTS: b"w" * (2 * PIECE_BYTES + 17)}
OTHER_FILES = {CONFIG: b'{"r": 8}', WEIGHTS: b"other"}
"""As if the same adapter had been written by another program."""
FLIPPED = FILES[WEIGHTS][:-1] + b"x"

DAMAGE: Mapping[str, tuple[str, bytes | None]] = {
    "a file is missing": (WEIGHTS, None),
    "a small file is missing": (CONFIG, None),
    "a file is cut": (WEIGHTS, FILES[WEIGHTS][:PIECE_BYTES]),
    "a bit is flipped": (WEIGHTS, FLIPPED),
    "the manifest is cut": (MANIFEST_FILE, b'{"files": {'),
    "the manifest is empty": (MANIFEST_FILE, b""),
    "the manifest is no manifest": (MANIFEST_FILE, b'{"files": {"adapter_config.json": 1}}'),
}


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"), tmp_path / "scratch")
    request.getfixturevalue("s3")
    return open_store(f"s3://{BUCKET}/some/prefix", tmp_path / "scratch")


def publish(store: BlobStore, files: Mapping[str, bytes] = FILES) -> bool:
    with store.stage() as staging:
        for name, content in files.items():
            (staging.path / name).write_bytes(content)
        return staging.publish(DIGEST, {"digest": DIGEST.hex()})


def put(store: BlobStore, name: str, content: bytes | None) -> None:
    """Writes a file of the blob past the store, or removes it."""
    if isinstance(store, FolderStore):
        file = store.path(DIGEST) / name
        file.unlink()
        if content is not None:
            file.write_bytes(content)
    elif isinstance(store, S3Store):
        key = next(key for key, _ in store.objects.list_keys("sha256") if key.endswith("/" + name))
        store.objects.remove([key])
        if content is not None:
            store.objects.put(key, content)


@pytest.fixture(params=DAMAGE)
def damaged(request: pytest.FixtureRequest, store: BlobStore) -> BlobStore:
    """A store with a blob that is not what it was."""
    publish(store)
    assert is_intact(store, DIGEST)
    put(store, *DAMAGE[request.param])
    assert not is_intact(store, DIGEST)
    return store


def assert_holds(store: BlobStore, files: Mapping[str, bytes]) -> None:
    assert is_intact(store, DIGEST)
    assert {name: read_file(store, DIGEST, name) for name in store.manifest(DIGEST)["files"]} == files


def test_the_same_files_uploaded_again_mend_it(damaged: BlobStore) -> None:
    publish(damaged)
    assert_holds(damaged, FILES)
    assert not publish(damaged), "and then it is there"


@pytest.mark.parametrize("what", [what for what in DAMAGE if what != "a bit is flipped"])
def test_the_adapter_written_otherwise_takes_the_place_of_what_is_not_whole(
    store: BlobStore, what: str
) -> None:
    publish(store)
    put(store, *DAMAGE[what])
    assert publish(store, OTHER_FILES)
    assert_holds(store, OTHER_FILES)


def test_uploads_that_mend_it_at_once_never_make_a_mix(store: BlobStore) -> None:
    publish(store)
    put(store, WEIGHTS, None)
    uploads = [{name: str(number).encode() for name in FILES} for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda files: publish(store, files), uploads))
    assert is_intact(store, DIGEST)
    assert len({read_file(store, DIGEST, name) for name in FILES}) == 1
    put(store, WEIGHTS, b"")
    files = {name: read_file(store, DIGEST, CONFIG) for name in FILES}
    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(lambda _: publish(store, files), range(24)))
    assert_holds(store, files)


def test_a_blob_that_is_not_there_is_not_intact(store: BlobStore) -> None:
    assert not is_intact(store, DIGEST)


@pytest.mark.parametrize("files", [FILES, OTHER_FILES])
def test_what_is_whole_stays_as_it_is(store: BlobStore, files: Mapping[str, bytes]) -> None:
    publish(store)
    before = store.manifest(DIGEST)
    assert not publish(store, files)
    assert store.manifest(DIGEST) == before
    assert_holds(store, FILES)


def test_the_end_of_a_file_comes_when_all_of_it_is_known_to_be_right(store: BlobStore) -> None:
    publish(store)
    put(store, WEIGHTS, FLIPPED)
    got = b""
    with pytest.raises(CorruptBlob, match=WEIGHTS):
        for piece in store.chunks(DIGEST, WEIGHTS):
            got += piece
    assert got == FILES[WEIGHTS][: 2 * PIECE_BYTES]
    put(store, CONFIG, b"[]")
    with pytest.raises(CorruptBlob, match=CONFIG):
        next(store.chunks(DIGEST, CONFIG))


@pytest.mark.parametrize(
    "content", [b'{"oops":', b"[]", b'{"files": [1]}', b'{"files": {"a": {"bytes": 1}}}']
)
def test_a_manifest_that_cannot_be_read_is_named(store: BlobStore, content: bytes) -> None:
    publish(store)
    put(store, MANIFEST_FILE, content)
    sentence = rf"^The manifest sha256/.*{DIGEST.hex()}/{MANIFEST_FILE} in the store is damaged\.$"
    with pytest.raises(CorruptBlob, match=sentence):
        store.manifest(DIGEST)
    with pytest.raises(CorruptBlob, match=sentence):
        next(store.chunks(DIGEST, CONFIG))


def test_a_damaged_manifest_can_be_withdrawn_restored_and_purged(store: BlobStore) -> None:
    publish(store)
    put(store, MANIFEST_FILE, b'{"oops":')
    trashed = store.withdraw(DIGEST)
    assert trashed is not None and list(store.digests()) == []
    trashed.restore()
    trashed.purge()
    assert list(store.digests()) == [DIGEST] and store.trashed() == []
    trashed = store.withdraw(DIGEST)
    assert trashed is not None
    trashed.purge()
    assert list(store.digests()) == [] and store.trashed() == []


@pytest.fixture
def bucket(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store in which what was written before this moment is old enough to be an orphan."""
    monkeypatch.setattr(s3_store, "_ORPHANS_AFTER_S", -5.0)
    monkeypatch.setattr(s3_store, "_ORPHANS_EVERY_S", 0.0)
    store = open_store(f"s3://{BUCKET}", tmp_path / "scratch")
    assert isinstance(store, S3Store)
    return store


def keys(store: S3Store) -> list[str]:
    return [key for key, _ in store.objects.list_keys("sha256")]


def test_files_of_a_damaged_manifest_go_when_it_is_gone(bucket: S3Store) -> None:
    publish(bucket)
    put(bucket, MANIFEST_FILE, b'{"oops":')
    bucket.objects.put(f"sha256/{DIGEST.hex()[:2]}/{DIGEST.hex()}/0123/{CONFIG}", b"of a crashed upload")
    assert bucket.clean(0) == 0 and len(keys(bucket)) == 4, "somebody may yet put it right"
    trashed = bucket.withdraw(DIGEST)
    assert trashed is not None
    trashed.purge()
    assert bucket.clean(0) == 2 and keys(bucket) == []


def test_what_has_been_replaced_goes_later(bucket: S3Store) -> None:
    """A download of its files may be under way."""
    publish(bucket)
    put(bucket, WEIGHTS, None)
    assert publish(bucket, OTHER_FILES)
    assert len(keys(bucket)) == 4
    assert bucket.clean(0) == 1 and len(keys(bucket)) == 3
    assert_holds(bucket, OTHER_FILES)


def test_an_upload_that_fails_takes_nothing_from_a_blob_that_is_there(
    bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(bucket)

    def fail(key: str, path: Path) -> None:
        raise StoreUnavailable("as when the bucket goes away")

    with monkeypatch.context() as patch:
        patch.setattr(bucket.objects, "put_file", fail)
        with pytest.raises(StoreUnavailable):
            publish(bucket)
    assert_holds(bucket, FILES)


@pytest.mark.parametrize("generation", [None, 1.5, "", "a/b"])
def test_a_manifest_says_where_its_files_are(bucket: S3Store, generation: object) -> None:
    key = f"sha256/{DIGEST.hex()[:2]}/{DIGEST.hex()}/{MANIFEST_FILE}"
    bucket.put_record("x", {"files": {}, "generation": generation})
    raw = bucket.objects.get("records/x.json")
    assert raw is not None
    bucket.objects.put(key, raw)
    with pytest.raises(CorruptBlob):
        bucket.manifest(DIGEST)
