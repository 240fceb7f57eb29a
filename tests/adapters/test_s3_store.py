"""What is a bucket's alone: uploads cut in the middle, a server that goes away, and files that are not what
they should be."""

from __future__ import annotations

import hashlib
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from obstore.store import S3Store as Bucket

from adapters import s3_bucket, s3_store
from adapters.blob_store import CorruptBlob, StoreUnavailable, open_store, read_file
from adapters.s3_bucket import S3Objects
from adapters.s3_store import S3Store
from tests.s3_server import BUCKET, S3Server

DIGEST = hashlib.sha256(b"one").digest()
SIZE = 5 * 2**20 + 17


@pytest.fixture
def store(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store that sends and fetches files in small parts, and gives up soon."""
    monkeypatch.setattr(s3_bucket, "_PART_BYTES", 5 * 2**20)
    monkeypatch.setattr(s3_store, "_ORPHANS_EVERY_S", 0.0)
    bucket = Bucket(
        BUCKET,
        client_options={"allow_http": True, "timeout": timedelta(seconds=2)},
        retry_config={"max_retries": 9, "retry_timeout": timedelta(seconds=1.5)},
    )
    return S3Store(S3Objects(bucket), tmp_path / "scratch")


def publish(store: S3Store, *, fill: bytes = b"w") -> bool:
    with store.stage() as staging:
        (staging.path / "adapter_config.json").write_bytes(b"{}")
        (staging.path / "adapter_model.safetensors").write_bytes(fill * SIZE)
        return staging.publish(DIGEST, {})


def objects(store: S3Store) -> list[str]:
    return [key for key, _ in store.objects.list_keys("sha256")]


@pytest.mark.parametrize("cut_after", [1, 3000, 2**20, 5 * 2**20 + 4000])
def test_a_connection_cut_in_an_upload_is_mended_by_itself(
    store: S3Store, s3: S3Server, cut_after: int
) -> None:
    s3.cut_after = cut_after
    assert publish(store)
    assert s3.cut_after is None
    assert hashlib.sha256(read_file(store, DIGEST, "adapter_model.safetensors")).hexdigest() == (
        hashlib.sha256(b"w" * SIZE).hexdigest()
    )


@pytest.mark.parametrize("cut_after", [1, 2**20, 5 * 2**20 + 4000])
def test_a_connection_cut_in_a_fetch_is_mended_by_itself(
    store: S3Store, s3: S3Server, tmp_path: Path, cut_after: int
) -> None:
    publish(store)
    s3.cut_after = cut_after
    store.fetch(DIGEST, tmp_path)
    assert s3.cut_after is None
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == b"w" * SIZE


def test_a_server_that_is_away_is_one_clear_fault_and_leaves_no_blob(store: S3Store, s3: S3Server) -> None:
    s3.is_away = True
    with pytest.raises(StoreUnavailable, match="does not answer") as fault:
        publish(store)
    assert len(str(fault.value)) < 400 and "\n" not in str(fault.value)
    with pytest.raises(StoreUnavailable):
        store.contains(DIGEST)
    s3.is_away = False
    assert not store.contains(DIGEST)
    assert publish(store) and len(objects(store)) >= 3


def test_an_upload_goes_on_over_a_restart_of_the_server(store: S3Store, s3: S3Server) -> None:
    s3.is_away = True
    threading.Timer(0.3, setattr, (s3, "is_away", False)).start()
    assert publish(store)
    assert s3.num_refused > 0


def test_what_a_lost_upload_has_written_is_removed(store: S3Store) -> None:
    publish(store)
    before = objects(store)
    assert not publish(store, fill=b"x")
    assert objects(store) == before


def test_what_a_crashed_upload_has_written_is_removed_later(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)
    before = objects(store)
    orphan = DIGEST.hex()[:2] + "/" + DIGEST.hex() + "/0123/adapter_config.json"
    store.objects.put(f"sha256/{orphan}", b"{}")
    other = hashlib.sha256(b"other").hexdigest()
    store.objects.put(f"sha256/{other[:2]}/{other}/4567/adapter_config.json", b"{}")
    assert store.clean(older_than_s=0) == 0
    monkeypatch.setattr(s3_store, "_ORPHANS_AFTER_S", -5.0)
    monkeypatch.setattr(s3_store, "_ORPHANS_EVERY_S", 3600.0)
    assert store.clean(older_than_s=0) == 2
    assert objects(store) == before
    store.objects.put(f"sha256/{orphan}", b"{}")
    assert store.clean(older_than_s=0) == 0  # not so soon again


def test_files_of_a_withdrawn_blob_are_no_orphans(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "_ORPHANS_AFTER_S", -5.0)
    publish(store)
    trashed = store.withdraw(DIGEST)
    assert trashed is not None
    assert store.clean(older_than_s=0) == 0
    trashed.restore()
    assert len(read_file(store, DIGEST, "adapter_model.safetensors")) == SIZE


def test_a_corrupt_file_is_refused_however_it_is_read(store: S3Store, s3: S3Server, tmp_path: Path) -> None:
    publish(store)
    key = next(key for key in objects(store) if key.endswith("safetensors"))
    s3.corrupt(key, b"x" + b"w" * (SIZE - 1))
    with pytest.raises(CorruptBlob, match=r"adapter_model\.safetensors"):
        store.fetch(DIGEST, tmp_path)
    with pytest.raises(CorruptBlob):
        store.copy_file(DIGEST, "adapter_model.safetensors", tmp_path / "copy")
    with pytest.raises(CorruptBlob):
        read_file(store, DIGEST, "adapter_model.safetensors")


def test_a_bucket_that_is_not_there_is_said_to_be_missing(s3: S3Server, tmp_path: Path) -> None:
    store = open_store("s3://no-such-bucket", tmp_path)
    for verb in (
        lambda: store.contains(DIGEST),
        lambda: store.put_record("a", {}),
        lambda: [*store.digests()],
    ):
        with pytest.raises(StoreUnavailable, match="bucket of the S3 store does not exist"):
            verb()


def test_fetching_holds_a_few_parts_and_not_the_file(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store)
    monkeypatch.setattr(s3_bucket, "_PART_BYTES", 2**16)
    pieces = store.chunks(DIGEST, "adapter_model.safetensors")
    next(pieces)
    assert len(next(pieces)) <= 2**16
    pieces.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("s3-fetch")]


def test_what_others_put_into_the_bucket_keeps_nobody_from_tidying_it(store: S3Store) -> None:
    publish(store)
    for key in (
        "sha256/readme",
        "sha256/ab/readme",
        "sha256/ab/cd/manifest.json",
        "sha256/ab/cd/e/f",
        "trash/x",
    ):
        store.objects.put(key, b"{}")
    store.objects.put("records/names/acme/torn.json", b"{")
    assert list(store.digests()) == [DIGEST] and store.trashed() == []
    assert store.clean(0) == 0 and store.contains(DIGEST)
    assert list(store.list_records("names")) == [("names/acme/torn", {})]
