"""Plain files beside the blobs: the same in a folder and in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.blob_store import StoreUnavailable, open_store
from adapters.file_store import FileStore, open_files
from tests.s3_server import BUCKET, S3Server


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> FileStore:
    location = str(tmp_path / "store") if request.param == "folder" else f"s3://{BUCKET}/loraplex"
    return open_files(location, open_store(location, tmp_path / "cache"))


def put(store: FileStore, tmp_path: Path, name: str, data: bytes) -> None:
    source = tmp_path / "source"
    source.write_bytes(data)
    store.put(name, source)


def test_a_file_is_read_in_parts_replaced_and_removed(store: FileStore, tmp_path: Path) -> None:
    put(store, tmp_path, "acme/file-1", b"0123456789")
    put(store, tmp_path, "globex/file-1", b"other")
    assert store.read("acme/file-1", 0, 10) == b"0123456789"
    assert store.read("acme/file-1", 3, 4) == b"3456"
    put(store, tmp_path, "acme/file-1", b"new")
    assert store.read("acme/file-1", 0, 3) == b"new"
    assert sorted(name for name, _ in store.names()) == ["acme/file-1", "globex/file-1"]
    put(store, tmp_path, "acme/empty", b"")
    assert store.read("acme/empty", 0, 0) == b""
    store.delete("acme/empty")
    store.delete("acme/file-1")
    store.delete("acme/file-1")
    with pytest.raises((FileNotFoundError, StoreUnavailable)):
        store.read("acme/file-1", 0, 3)
    assert [name for name, _ in store.names()] == ["globex/file-1"]


def test_a_name_leads_nowhere_else(store: FileStore, tmp_path: Path) -> None:
    for name in ("../a", "a", "a/../b", "a/b/c", "/a/b", "a/.b", ""):
        with pytest.raises(ValueError, match="no name"):
            store.read(name, 0, 1)
        with pytest.raises(ValueError, match="no name"):
            put(store, tmp_path, name, b"")


def test_files_of_a_volume_that_has_vanished_are_not_lost(tmp_path: Path) -> None:
    root = tmp_path / "store"
    files = open_files(str(root), open_store(str(root), tmp_path / "cache"))
    put(files, tmp_path, "acme/file-1", b"0123456789")
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    calls = [
        lambda: files.read("acme/file-1", 0, 1),
        lambda: put(files, tmp_path, "acme/file-2", b"1"),
        lambda: files.delete("acme/file-1"),
        lambda: list(files.names()),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="Is its volume mounted"):
            call()
    assert list(root.iterdir()) == []
