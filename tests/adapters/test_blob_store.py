from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapters.blob_store import MANIFEST_FILE, BlobNotFound, BlobStore

DIGEST = hashlib.sha256(b"one").digest()
OTHER = hashlib.sha256(b"other").digest()
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "store")


def publish(store: BlobStore, digest: bytes = DIGEST, files: dict[str, bytes] = FILES) -> bool:
    with store.stage() as staging:
        for name, content in files.items():
            (staging.path / name).write_bytes(content)
        return staging.publish(digest, {"digest": digest.hex()})


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_publishes_the_files_and_the_manifest(store: BlobStore, tmp_path: Path) -> None:
    assert not store.contains(DIGEST)
    assert publish(store)
    folder = store.path(DIGEST)
    assert folder == tmp_path / "store" / "sha256" / DIGEST.hex()[:2] / DIGEST.hex()
    assert {file.name for file in folder.iterdir()} == {*FILES, MANIFEST_FILE}
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    assert store.manifest(DIGEST) == {"digest": DIGEST.hex()}
    assert store.contains(DIGEST) and not store.contains(OTHER)
    assert list((tmp_path / "store" / "staging").iterdir()) == []


def test_others_may_read_a_blob_and_nobody_an_upload(store: BlobStore) -> None:
    publish(store)
    folder = store.path(DIGEST)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o644}
    with store.stage() as staging:
        assert stat.S_IMODE(staging.path.stat().st_mode) == 0o700


def test_publishing_a_digest_again_changes_nothing(store: BlobStore) -> None:
    publish(store)
    before = (store.path(DIGEST) / "adapter_config.json").stat()
    assert not publish(
        store, files={"adapter_config.json": b'{"other": 1}', "adapter_model.safetensors": b""}
    )
    after = (store.path(DIGEST) / "adapter_config.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_an_upload_that_fails_leaves_nothing(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), store.stage() as staging:
        (staging.path / "adapter_config.json").write_bytes(b"{}")
        raise RuntimeError
    assert everything(tmp_path) == set()
    assert list((tmp_path / "store" / "staging").iterdir()) == []


def test_every_file_and_folder_reaches_the_disk_before_the_rename(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def logged_fsync(descriptor: int) -> None:
        log.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def logged_rename(self: Path, target: Path) -> Path:
        log.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    with store.stage() as staging:
        for name, content in FILES.items():
            (staging.path / name).write_bytes(content)
        staging.publish(DIGEST, {})
        at = log.index("rename")
        assert {f"fsync {name}" for name in (*FILES, MANIFEST_FILE)} <= set(log[:at])
        assert f"fsync {staging.path.name}" in log[:at]
        assert log[at + 1 :] == [f"fsync {DIGEST.hex()[:2]}"]


def test_many_publishers_of_one_digest_make_one_blob(store: BlobStore, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        fresh = list(pool.map(lambda _: publish(store), range(64)))
    assert fresh.count(True) == 1
    assert {path.rsplit("/", 1)[1] for path in everything(tmp_path)} == {*FILES, MANIFEST_FILE}


def test_loses_a_race_after_looking(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both publishers saw no blob; the second's rename finds one."""
    publish(store)
    monkeypatch.setattr(store, "contains", lambda _: False)
    assert not publish(store, files={"adapter_config.json": b"second"})
    assert (store.path(DIGEST) / "adapter_config.json").read_bytes() == b"{}"


_PUBLISHER = """
import sys, hashlib
from pathlib import Path
from adapters.blob_store import BlobStore
store = BlobStore(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(1_000_000):
    with store.stage() as staging:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (staging.path / name).write_bytes(str(number).encode() * 50)
        staging.publish(hashlib.sha256(str(number).encode()).digest(), {"number": number})
"""


def test_kill_in_the_middle_leaves_only_whole_blobs(tmp_path: Path) -> None:
    root = tmp_path / "store"
    for pause in (0.0, 0.01, 0.05):
        process = subprocess.Popen([sys.executable, "-c", _PUBLISHER, str(root)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.1 + pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    blobs = list(root.glob("sha256/*/*"))
    assert blobs
    store = BlobStore(root)
    for blob in blobs:
        number = store.manifest(bytes.fromhex(blob.name))["number"]
        assert hashlib.sha256(str(number).encode()).hexdigest() == blob.name
        for name in FILES:
            assert (blob / name).read_bytes() == str(number).encode() * 50
    store.clean(older_than_s=-1)
    assert list((root / "staging").iterdir()) == []


def test_cleans_old_uploads_and_leaves_those_under_way(store: BlobStore) -> None:
    old, young = store.stage(), store.stage()
    growing = store.stage()
    (growing.path / "adapter_model.safetensors").write_bytes(b"still coming")
    for folder in (old.path, growing.path):
        os.utime(folder, (0, 0))
    assert store.clean(older_than_s=3600) == 1
    assert not old.path.exists() and young.path.exists() and growing.path.exists()


def test_deletes(store: BlobStore, tmp_path: Path) -> None:
    publish(store)
    publish(store, OTHER)
    store.delete(DIGEST)
    store.delete(DIGEST)
    assert not store.contains(DIGEST) and store.contains(OTHER)
    with pytest.raises(BlobNotFound, match=DIGEST.hex()):
        store.path(DIGEST)
    with pytest.raises(BlobNotFound):
        store.manifest(DIGEST)
    assert len(everything(tmp_path)) == 3
    assert publish(store)


def test_what_is_being_purged_cannot_be_restored(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store)
    mine, other = store.withdraw(DIGEST), store.trashed()[0]
    assert mine is not None
    with monkeypatch.context() as crash:
        crash.setattr("shutil.rmtree", lambda *_, **__: None)
        other.purge()
    mine.restore()
    assert not store.contains(DIGEST) and store.trashed() == []
    assert store.clean(older_than_s=3600) == 1
    mine.purge()


def test_what_is_withdrawn_can_be_restored(store: BlobStore) -> None:
    publish(store)
    trashed = store.withdraw(DIGEST)
    assert trashed is not None and not store.contains(DIGEST)
    assert [item.digest for item in store.trashed()] == [DIGEST]
    trashed.restore()
    assert store.contains(DIGEST) and store.trashed() == []
    assert store.withdraw(OTHER) is None


def test_restoring_gives_way_to_a_new_publication(store: BlobStore) -> None:
    publish(store)
    trashed = store.withdraw(DIGEST)
    assert trashed is not None
    publish(store, files={"adapter_config.json": b"new"})
    trashed.restore()
    trashed.purge()
    assert (store.path(DIGEST) / "adapter_config.json").read_bytes() == b"new"
    assert store.trashed() == []


@pytest.mark.parametrize("digest", [b"", b"\0" * 31, b"../../etc/passwd", DIGEST.hex(), "../" * 10])
def test_only_a_digest_makes_a_path(store: BlobStore, digest: object) -> None:
    for verb in (store.path, store.contains, store.delete, store.withdraw):
        with pytest.raises(ValueError, match="32 bytes"):
            verb(digest)  # type: ignore[arg-type]
