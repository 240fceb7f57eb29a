"""The engine's copies on local disk: what is read stays, fetches are single, and the bound holds."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapters.blob_store import BlobNotFound, StoreUnavailable, open_reader, open_store
from adapters.folder_store import FolderStore
from adapters.store_cache import StoreCache
from tests.s3_server import BUCKET, S3Server

SIZE = 1000


def digest_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


class Remote:
    """A store behind the cache that counts fetches and can be slow or away; blob `n` is SIZE bytes of n."""

    def __init__(self, tmp_path: Path, count: int = 12) -> None:
        self._store = FolderStore(tmp_path / "remote")
        self.fetched: list[bytes] = []
        self.delay = 0.0
        self.is_away = False
        for number in range(count):
            with self._store.stage() as staging:
                (staging.path / "weights").write_bytes(bytes([number]) * SIZE)
                staging.publish(digest_of(number), {})

    def contains(self, digest: bytes) -> bool:
        return self._store.contains(digest)

    def manifest(self, digest: bytes) -> dict[str, Any]:
        if self.is_away:
            raise StoreUnavailable("away")
        return self._store.manifest(digest)

    def fetch(self, digest: bytes, folder: Path) -> dict[str, Any]:
        self.fetched.append(digest)
        time.sleep(self.delay)
        if self.is_away:
            (folder / "weights").write_bytes(b"half")
            raise StoreUnavailable("away")
        for file in self._store.path(digest).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return self._store.manifest(digest)


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path)


def open_cache(remote: Remote, tmp_path: Path, room: int = 3) -> StoreCache:
    return StoreCache(remote, tmp_path / "cache", room * SIZE)


def read(cache: StoreCache, number: int) -> bytes:
    with cache.reading(digest_of(number)) as folder:
        return (folder / "weights").read_bytes()


def on_disk(tmp_path: Path) -> int:
    return sum(file.stat().st_size for file in (tmp_path / "cache").rglob("weights"))


def test_a_blob_is_fetched_once_and_then_read_from_disk(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path)
    assert not cache.has_local(digest_of(1)) and cache.contains(digest_of(1))
    assert read(cache, 1) == read(cache, 1) == b"\1" * SIZE
    assert remote.fetched == [digest_of(1)] and cache.has_local(digest_of(1))
    with pytest.raises(BlobNotFound), cache.reading(b"\0" * 32):
        pass
    remote.is_away = True
    assert read(cache, 1) == b"\1" * SIZE


def test_many_readers_at_once_make_one_fetch(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path)
    remote.delay = 0.1
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: read(cache, 4), range(8))) == {b"\4" * SIZE}
    assert remote.fetched == [digest_of(4)]


def test_the_least_recently_used_goes(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path)
    for number in (0, 1, 2, 0, 3):
        read(cache, number)
    assert [number for number in range(5) if cache.has_local(digest_of(number))] == [0, 2, 3]
    assert cache.nbytes == on_disk(tmp_path) == 3 * SIZE


def test_what_is_being_read_is_never_evicted_and_others_wait_for_room(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path, room=1)
    with ThreadPoolExecutor(1) as pool:
        with cache.reading(digest_of(0)) as folder:
            waiting = pool.submit(read, cache, 1)
            time.sleep(0.1)
            assert not waiting.done() and (folder / "weights").read_bytes() == b"\0" * SIZE
            cache.discard(digest_of(0))
            assert (folder / "weights").exists()
        assert waiting.result(timeout=60) == b"\1" * SIZE
    assert not cache.has_local(digest_of(0))


def test_copies_that_others_removed_are_fetched_again(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path)
    for number in (0, 1):
        read(cache, number)
    for folder in (tmp_path / "cache").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        read(cache, 0)
    assert read(cache, 0) == b"\0" * SIZE, "its reader noticed"
    cache.discard(digest_of(1))
    assert read(cache, 1) == b"\1" * SIZE
    for number in (2, 3):
        read(cache, number)
    assert cache.nbytes == on_disk(tmp_path) == 3 * SIZE, "and nothing is kept for readers that failed"


def test_a_disk_that_is_full_costs_what_was_used_longest_ago(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache(remote, tmp_path, room=100)
    fetch = remote.fetch

    def fetch_to_a_small_disk(digest: bytes, folder: Path) -> dict[str, Any]:
        if on_disk(tmp_path) >= 3 * SIZE:
            (folder / "weights").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return fetch(digest, folder)

    monkeypatch.setattr(remote, "fetch", fetch_to_a_small_disk)
    for number in (0, 1, 2, 0, 3):
        assert read(cache, number) == bytes([number]) * SIZE
    assert [number for number in range(5) if cache.has_local(digest_of(number))] == [0, 2, 3]
    assert cache.nbytes == on_disk(tmp_path) == 3 * SIZE
    assert "the cache's disk is full" in caplog.text
    with contextlib.ExitStack() as stack:
        for number in (0, 2, 3):
            stack.enter_context(cache.reading(digest_of(number)))
        with pytest.raises(OSError, match="No space left"):
            read(cache, 4)
    assert read(cache, 4) == b"\4" * SIZE
    assert cache.nbytes == on_disk(tmp_path) == 3 * SIZE


def test_a_blob_larger_than_the_cache_is_refused_with_the_flag(remote: Remote, tmp_path: Path) -> None:
    cache = StoreCache(remote, tmp_path / "cache", SIZE - 1)
    with pytest.raises(OSError, match="--store-cache-bytes"):
        read(cache, 0)
    assert remote.fetched == [] and cache.nbytes == 0


def test_a_fetch_that_fails_leaves_nothing_and_the_next_one_works(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path, room=1)
    manifest = remote.manifest
    remote.is_away, remote.manifest = True, lambda digest: remote._store.manifest(digest)  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            read(cache, 1)
    assert cache.nbytes == on_disk(tmp_path) == 0
    remote.is_away, remote.manifest = False, manifest  # type: ignore[method-assign]
    assert read(cache, 1) == b"\1" * SIZE


def test_copies_survive_a_restart_in_their_order(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path)
    for number in (0, 1, 2):
        read(cache, number)
        time.sleep(0.02)
    read(cache, 0)
    (tmp_path / "cache" / "incoming" / "half").mkdir()
    cache.close()
    cache = open_cache(remote, tmp_path, room=2)
    assert not (tmp_path / "cache" / "incoming" / "half").exists()
    assert [number for number in range(3) if cache.has_local(digest_of(number))] == [0, 2]
    remote.is_away = True
    assert read(cache, 0) == b"\0" * SIZE and read(cache, 2) == b"\2" * SIZE


@pytest.mark.parametrize("damage", ["changed", "short", "no file", "no manifest", "no JSON"])
def test_a_corrupt_copy_is_fetched_again(remote: Remote, tmp_path: Path, damage: str) -> None:
    cache = open_cache(remote, tmp_path)
    with cache.reading(digest_of(1)) as folder:
        weights, manifest = folder / "weights", folder / "manifest.json"
    cache.close()
    if damage == "changed":
        weights.write_bytes(b"\2" * SIZE)
    elif damage == "short":
        weights.write_bytes(b"\1")
    elif damage == "no file":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_bytes(b"[")
    cache = open_cache(remote, tmp_path)
    assert read(cache, 1) == b"\1" * SIZE
    assert len(remote.fetched) == 2 and cache.nbytes == on_disk(tmp_path) == SIZE


def test_a_copy_that_a_reader_failed_on_is_not_believed(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path)
    with pytest.raises(RuntimeError), cache.reading(digest_of(1)) as folder:
        (folder / "weights").write_bytes(b"\2" * SIZE)
        raise RuntimeError
    assert read(cache, 1) == b"\1" * SIZE


def test_a_discarded_copy_is_gone_from_disk(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path)
    read(cache, 1)
    assert cache.copies() == [digest_of(1)]
    cache.discard(digest_of(1))
    cache.discard(digest_of(1))
    assert cache.nbytes == on_disk(tmp_path) == 0 and not cache.has_local(digest_of(1))


def test_two_engines_cannot_have_one_folder(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path)
    with pytest.raises(OSError, match="--store-cache"):
        open_cache(remote, tmp_path)
    cache.close()
    open_cache(remote, tmp_path).close()


def test_readers_at_random_see_whole_blobs_within_the_bound(remote: Remote, tmp_path: Path) -> None:
    cache = open_cache(remote, tmp_path, room=4)
    stop = threading.Event()
    too_much: list[int] = []

    def watch() -> None:
        while not stop.is_set():
            if cache.nbytes > 4 * SIZE:
                too_much.append(cache.nbytes)

    def reader(seed: int) -> None:
        choices = random.Random(seed)
        for _ in range(60):
            number = choices.randrange(12)
            with cache.reading(digest_of(number)) as folder:
                time.sleep(choices.random() / 500)
                assert (folder / "weights").read_bytes() == bytes([number]) * SIZE
            if choices.random() < 0.2:
                cache.discard(digest_of(choices.randrange(12)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(reader, range(3)))
    stop.set()
    watcher.join()
    assert too_much == [] and on_disk(tmp_path) == cache.nbytes


def test_an_engine_reads_a_bucket_through_the_cache(s3: S3Server, tmp_path: Path) -> None:
    store = open_store(f"s3://{BUCKET}/x", tmp_path / "gateway")
    with store.stage() as staging:
        (staging.path / "weights").write_bytes(b"w")
        staging.publish(digest_of(0), {})
    reader = open_reader(f"s3://{BUCKET}/x", tmp_path / "engine", 10)
    for _ in range(2):
        with reader.reading(digest_of(0)) as folder:
            assert (folder / "weights").read_bytes() == b"w"
        s3.is_away = True
    assert reader.has_local(digest_of(0)) and reader.contains(digest_of(0))
