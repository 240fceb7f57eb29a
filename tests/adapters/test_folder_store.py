"""What is the folder's alone: its layout, its order of writing, and what a kill leaves."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.blob_store import MANIFEST_FILE, StoreUnavailable, is_intact, open_reader
from adapters.folder_store import FolderStore

DIGEST = hashlib.sha256(b"one").digest()
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def publish(store: FolderStore, digest: bytes = DIGEST, files: dict[str, bytes] = FILES) -> bool:
    with store.stage() as staging:
        for name, content in files.items():
            (staging.path / name).write_bytes(content)
        return staging.publish(digest, {"digest": digest.hex()})


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_publishes_the_files_and_the_manifest(store: FolderStore, tmp_path: Path) -> None:
    assert not store.contains(DIGEST)
    assert publish(store)
    folder = store.path(DIGEST)
    assert folder == tmp_path / "store" / "sha256" / DIGEST.hex()[:2] / DIGEST.hex()
    assert {file.name for file in folder.iterdir()} == {*FILES, MANIFEST_FILE}
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    assert list((tmp_path / "store" / "staging").iterdir()) == []


def test_others_may_read_a_blob_and_nobody_an_upload(store: FolderStore) -> None:
    publish(store)
    folder = store.path(DIGEST)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o644}
    with store.stage() as staging:
        assert stat.S_IMODE(staging.path.stat().st_mode) == 0o700


def test_a_reader_makes_nothing_and_names_a_volume_that_is_not_mounted(tmp_path: Path) -> None:
    reader = open_reader(str(tmp_path / "store"), tmp_path, 1)
    assert list((tmp_path / "store").iterdir()) == []
    for ask in (reader.contains, reader.has_local):
        with pytest.raises(StoreUnavailable, match="sha256 is not there"):
            ask(DIGEST)
    assert publish(FolderStore(tmp_path / "store"))
    with reader.reading(DIGEST) as folder:
        assert (folder / MANIFEST_FILE).exists()


def test_an_upload_that_fails_leaves_nothing(store: FolderStore, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), store.stage() as staging:
        (staging.path / "adapter_config.json").write_bytes(b"{}")
        raise RuntimeError
    assert everything(tmp_path) == set()
    assert list((tmp_path / "store" / "staging").iterdir()) == []


def test_every_file_and_folder_reaches_the_disk_before_the_rename(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
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
        assert len(staging_folders := [line for line in log[:at] if len(line) == len("fsync ") + 32]) == 1
        assert log.index(staging_folders[0]) > log.index(f"fsync {MANIFEST_FILE}")
        assert log[at + 1 :] == [f"fsync {DIGEST.hex()[:2]}"]


_PUBLISHER = """
import sys, hashlib
from pathlib import Path
from adapters.folder_store import FolderStore
store = FolderStore(Path(sys.argv[1]))
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
        while not list(root.glob("sha256/*/*")):
            time.sleep(0.01)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    blobs = list(root.glob("sha256/*/*"))
    assert blobs
    store = FolderStore(root)
    for blob in blobs:
        number = store.manifest(bytes.fromhex(blob.name))["number"]
        assert hashlib.sha256(str(number).encode()).hexdigest() == blob.name
        for name in FILES:
            assert (blob / name).read_bytes() == str(number).encode() * 50
    store.clean(older_than_s=-1)
    assert list((root / "staging").iterdir()) == []


def test_cleans_old_uploads_and_leaves_those_under_way(store: FolderStore) -> None:
    old, young = store.stage(), store.stage()
    growing = store.stage()
    (growing.path / "adapter_model.safetensors").write_bytes(b"still coming")
    for folder in (old.path, growing.path):
        os.utime(folder, (0, 0))
    assert store.clean(older_than_s=3600) == 1
    assert not old.path.exists() and young.path.exists() and growing.path.exists()


def test_what_is_being_purged_cannot_be_restored(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_blob_is_read_where_it_lies(store: FolderStore) -> None:
    publish(store)
    with store.reading(DIGEST) as folder:
        assert folder == store.path(DIGEST)
    assert store.has_local(DIGEST)
    store.discard(DIGEST)
    assert store.contains(DIGEST)


def test_a_record_half_written_by_a_crash_is_no_record_and_goes(store: FolderStore, tmp_path: Path) -> None:
    store.put_record("names/acme/sql/1", {})
    half = tmp_path / "store" / "records" / "names" / "acme" / "sql" / ".0123"
    half.write_text("{")
    assert len(list(store.list_records("names"))) == 1
    assert store.clean(older_than_s=3600) == 0
    assert store.clean(older_than_s=-10) == 1 and not half.exists()


def test_a_store_whose_volume_has_vanished_lacks_nothing_and_takes_nothing(
    store: FolderStore, tmp_path: Path
) -> None:
    """As an unmounted volume: what was in it is not lost, and the bare mount point stays bare."""
    publish(store)
    store.put_record("names/acme/sql/1", {})
    root = tmp_path / "store"
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    calls = [
        lambda: store.contains(DIGEST),
        lambda: store.path(DIGEST),
        lambda: store.manifest(DIGEST),
        lambda: list(store.chunks(DIGEST, "adapter_config.json")),
        lambda: store.copy_file(DIGEST, "adapter_config.json", tmp_path / "copy"),
        lambda: list(store.digests()),
        lambda: store.withdraw(DIGEST),
        lambda: store.stage(),
        lambda: store.put_record("names/acme/sql/2", {}),
        lambda: store.read_record("names/acme/sql/1"),
        lambda: list(store.list_records("names")),
        lambda: store.delete_record("names/acme/sql/1"),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="Is its volume mounted"):
            call()
    assert list(root.iterdir()) == []
    root.rmdir()
    (tmp_path / "elsewhere").rename(root)
    assert store.contains(DIGEST) and store.read_record("names/acme/sql/1") == {}


def meanwhile(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> None:
    """Has `act` happen once, when a publication is about to replace a blob's file of that name."""
    link, waiting = os.link, [act]

    def linked(source: Path, target: Path, **how: Any) -> None:
        if target.name == f".{name}" and waiting:
            waiting.pop()()
        link(source, target, **how)

    monkeypatch.setattr(os, "link", linked)


def contents(store: FolderStore) -> dict[str, bytes]:
    assert is_intact(store, DIGEST)
    folder = store.path(DIGEST)
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != MANIFEST_FILE}


@pytest.mark.parametrize("name", FILES)
def test_files_never_get_into_the_blob_that_took_the_place_of_theirs(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    others = {name: b"written otherwise" for name in FILES}
    publish(store)
    (store.path(DIGEST) / "adapter_model.safetensors").unlink()
    replaced: list[bool] = []
    meanwhile(monkeypatch, name, lambda: replaced.append(publish(store, files=others)))
    assert not publish(store)
    assert replaced == [True] and contents(store) == others


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_purged", [False, True])
def test_a_blob_withdrawn_while_it_is_published_is_there_afterwards(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, name: str, is_purged: bool
) -> None:
    publish(store)

    def withdraw() -> None:
        trashed = store.withdraw(DIGEST)
        assert trashed is not None
        if is_purged:
            trashed.purge()

    meanwhile(monkeypatch, name, withdraw)
    assert publish(store) and contents(store) == FILES
    for trashed in store.trashed():
        trashed.restore()
        trashed.purge()
    assert contents(store) == FILES


def test_a_manifest_is_read_where_its_files_are_replaced(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when what has its name meanwhile lists the same files, and is gone again before they are."""
    others = {name: b"written otherwise" for name in FILES}
    publish(store, files=others)
    open_, withdrawn = os.open, []

    def opened(path: Path, flags: int, **how: Any) -> int:
        descriptor = open_(path, flags, **how)
        if Path(path).name == DIGEST.hex() and not withdrawn:
            withdrawn.append(store.withdraw(DIGEST))
            publish(store)
        return descriptor

    def put_back() -> None:
        same = store.withdraw(DIGEST)
        assert same is not None
        same.purge()
        withdrawn[0].restore()

    monkeypatch.setattr(os, "open", opened)
    meanwhile(monkeypatch, "adapter_config.json", put_back)
    assert not publish(store) and contents(store) == others


def test_a_blob_removed_by_another_machine_fails_no_upload(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)

    def remove() -> None:
        shutil.rmtree(store.path(DIGEST))
        raise OSError(errno.ESTALE, "Stale file handle")

    meanwhile(monkeypatch, "adapter_config.json", remove)
    assert publish(store) and contents(store) == FILES


def test_a_blob_that_was_in_the_way_and_is_gone_fails_no_upload(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        try:
            return rename(self, target)
        except OSError:
            assert store.withdraw(DIGEST) is not None
            raise

    monkeypatch.setattr(Path, "rename", renamed)
    assert publish(store) and contents(store) == FILES
