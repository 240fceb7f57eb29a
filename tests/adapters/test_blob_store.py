"""What every store does, whichever keeps the blobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapters import s3_store
from adapters.blob_store import BlobNotFound, BlobStore, check_location, open_store, read_file
from tests.s3_server import BUCKET

DIGEST = hashlib.sha256(b"one").digest()
OTHER = hashlib.sha256(b"other").digest()
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}

OpenStore = Callable[[], BlobStore]


@pytest.fixture(params=["folder", "s3"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Opens the same store again, as another process would."""
    if request.param == "folder":
        return lambda: open_store(str(tmp_path / "store"), tmp_path / "scratch")
    request.getfixturevalue("s3")
    return lambda: open_store(f"s3://{BUCKET}/some/prefix", tmp_path / "scratch")


@pytest.fixture
def store(reopen: OpenStore) -> BlobStore:
    return reopen()


def publish(store: BlobStore, digest: bytes = DIGEST, files: Mapping[str, bytes] = FILES) -> bool:
    with store.stage() as staging:
        for name, content in files.items():
            (staging.path / name).write_bytes(content)
        return staging.publish(digest, {"digest": digest.hex()})


def test_a_published_blob_is_read_as_it_was_staged(store: BlobStore, reopen: OpenStore) -> None:
    assert not store.contains(DIGEST) and list(store.digests()) == []
    assert publish(store)
    other_process = reopen()
    assert other_process.contains(DIGEST) and not other_process.contains(OTHER)
    for name, content in FILES.items():
        assert read_file(other_process, DIGEST, name) == content
    assert other_process.manifest(DIGEST)["digest"] == DIGEST.hex()
    assert other_process.manifest(DIGEST)["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in FILES.items()
    }
    assert list(store.digests()) == [DIGEST]


def test_hashes_known_from_the_way_are_taken(store: BlobStore) -> None:
    with store.stage() as staging:
        (staging.path / "adapter_config.json").write_bytes(b"{}")
        staging.hashes["adapter_config.json"] = "f" * 64
        assert staging.publish(DIGEST, {})
    assert store.manifest(DIGEST)["files"]["adapter_config.json"]["sha256"] == "f" * 64


def test_what_is_not_there_is_said_to_be_so(store: BlobStore, tmp_path: Path) -> None:
    publish(store)
    with pytest.raises(BlobNotFound, match=OTHER.hex()):
        store.manifest(OTHER)
    for digest, name in ((OTHER, "adapter_config.json"), (DIGEST, "tokenizer.json")):
        with pytest.raises(BlobNotFound):
            read_file(store, digest, name)
        with pytest.raises(BlobNotFound):
            store.copy_file(digest, name, tmp_path / "copy")
    assert store.withdraw(OTHER) is None


def test_publishing_a_digest_again_changes_nothing(store: BlobStore) -> None:
    publish(store)
    before = store.manifest(DIGEST)
    assert not publish(store, files={"adapter_config.json": b"other"})
    assert store.manifest(DIGEST) == before
    assert read_file(store, DIGEST, "adapter_config.json") == b"{}"


def test_an_upload_that_fails_leaves_nothing(store: BlobStore) -> None:
    with pytest.raises(RuntimeError), store.stage() as staging:
        (staging.path / "adapter_config.json").write_bytes(b"{}")
        raise RuntimeError
    assert not staging.path.exists() and list(store.digests()) == []


def test_many_publishers_of_one_digest_make_one_blob_and_never_a_mix(store: BlobStore) -> None:
    def upload(number: int) -> bool:
        content = str(number).encode()
        return publish(store, files=dict.fromkeys(FILES, content))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(upload, range(24))).count(True) == 1
    assert len({read_file(store, DIGEST, name) for name in FILES}) == 1


def test_a_staging_can_be_published_again_after_its_blob_is_gone(store: BlobStore) -> None:
    with store.stage() as staging:
        (staging.path / "adapter_config.json").write_bytes(b"{}")
        assert staging.publish(DIGEST, {})
        trashed = store.withdraw(DIGEST)
        assert trashed is not None
        trashed.purge()
        assert staging.publish(DIGEST, {})
    assert read_file(store, DIGEST, "adapter_config.json") == b"{}"


def test_a_file_of_a_blob_is_copied_out(store: BlobStore, tmp_path: Path) -> None:
    publish(store)
    target = store.scratch / "copy"
    store.copy_file(DIGEST, "adapter_model.safetensors", target)
    assert target.read_bytes() == b"weights"


def test_what_is_withdrawn_is_gone_at_once_and_can_be_restored(store: BlobStore) -> None:
    publish(store)
    trashed = store.withdraw(DIGEST)
    assert trashed is not None and not store.contains(DIGEST)
    assert [item.digest for item in store.trashed()] == [DIGEST]
    trashed.restore()
    trashed.purge()
    assert store.contains(DIGEST) and store.trashed() == []
    assert read_file(store, DIGEST, "adapter_model.safetensors") == b"weights"


def test_a_crash_between_restoring_and_purging_loses_nothing(store: BlobStore, reopen: OpenStore) -> None:
    publish(store)
    trashed = store.withdraw(DIGEST)
    assert trashed is not None
    trashed.restore()
    for left in reopen().trashed():
        left.restore()
        left.purge()
    assert read_file(store, DIGEST, "adapter_model.safetensors") == b"weights"
    assert store.trashed() == []


def test_restoring_gives_way_to_a_new_publication(store: BlobStore) -> None:
    publish(store)
    trashed = store.withdraw(DIGEST)
    assert trashed is not None
    publish(store, files=dict.fromkeys(FILES, b"new"))
    trashed.restore()
    trashed.purge()
    assert {read_file(store, DIGEST, name) for name in FILES} == {b"new"}
    assert store.trashed() == []


def test_what_is_purged_is_gone(store: BlobStore) -> None:
    publish(store)
    publish(store, OTHER)
    trashed = store.withdraw(DIGEST)
    assert trashed is not None
    trashed.purge()
    trashed.restore()
    assert list(store.digests()) == [OTHER] and store.trashed() == []


def test_records_are_kept_listed_and_deleted(store: BlobStore, reopen: OpenStore) -> None:
    store.put_record("names/acme/sql/1", {"digest": "a"})
    store.put_record("names/acme/sql/2", {"digest": "b"})
    store.put_record("names/acme-two/sql/1", {"digest": "c"})
    store.put_record("names/acme/sql/1", {"digest": "a", "live": True})
    assert store.read_record("names/acme/sql/1") == {"digest": "a", "live": True}
    assert store.read_record("names/acme/sql") is store.read_record("names/nobody/sql") is None
    assert sorted(reopen().list_records("names/acme"), key=str) == [
        ("names/acme/sql/1", {"digest": "a", "live": True}),
        ("names/acme/sql/2", {"digest": "b"}),
    ]
    store.delete_record("names/acme/sql/1")
    store.delete_record("names/acme/sql/1")
    assert sorted(path for path, _ in store.list_records("names")) == [
        "names/acme-two/sql/1",
        "names/acme/sql/2",
    ]
    assert list(store.list_records("nothing")) == []


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "names/../../x", "names//x", "names/.x", "a\nb"])
def test_only_plain_names_make_a_record(store: BlobStore, path: str) -> None:
    for verb in (lambda: store.put_record(path, {}), lambda: store.delete_record(path)):
        with pytest.raises(ValueError, match="no path of a record"):
            verb()
    with pytest.raises(ValueError, match="no path of a record"):
        list(store.list_records(path))


@pytest.mark.parametrize("digest", [b"", b"\0" * 31, b"../../etc/passwd", DIGEST.hex(), "../" * 10])
def test_only_a_digest_makes_a_path(store: BlobStore, digest: object) -> None:
    for verb in (store.contains, store.manifest, store.withdraw):
        with pytest.raises(ValueError, match="32 bytes"):
            verb(digest)  # type: ignore[arg-type]


def test_cleaning_leaves_uploads_under_way_and_blobs(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_store, "_ORPHANS_AFTER_S", 0.0)
    monkeypatch.setattr(s3_store, "_ORPHANS_EVERY_S", 0.0)
    publish(store)
    staging = store.stage()
    assert store.clean(older_than_s=3600) == 0
    assert staging.path.exists()
    assert store.clean(older_than_s=-10) == 1
    assert not staging.path.exists()
    assert read_file(store, DIGEST, "adapter_model.safetensors") == b"weights"


@pytest.mark.parametrize("location", ["http://x/y", "gs://bucket", "s3://", "s3:///prefix", "s3://UPPER/x"])
def test_a_location_that_is_none_is_refused_with_what_to_write(location: str) -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/prefix"):
        check_location(location)
