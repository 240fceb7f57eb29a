"""The tiers below the device: loads, their faults, and the budget of host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from builders import FakeAdapter, FakeStore, digest_of

from engine.adapter_tiers import MAX_LOADS, AdapterTiers, Loaded, LoadFailed


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def make_tiers(store: FakeStore) -> Iterator[Callable[..., AdapterTiers]]:
    made: list[AdapterTiers] = []

    def make(host_bytes: int = 1000, num_pages: int = 4, read: Callable | None = None) -> AdapterTiers:
        made.append(AdapterTiers(read or store.read, num_pages=num_pages, host_bytes=host_bytes))
        return made[-1]

    yield make
    for tiers in made:
        tiers.close()


def poll_until(tiers: AdapterTiers, count: int) -> list[Loaded | LoadFailed]:
    outcomes: list[Loaded | LoadFailed] = []
    deadline = time.monotonic() + 5
    while len(outcomes) < count and time.monotonic() < deadline:
        outcomes += tiers.poll()
        time.sleep(0.001)
    assert len(outcomes) == count
    return outcomes


def test_a_load_is_made_once_however_often_it_is_wanted(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    release = threading.Event()

    def slow_read(digest: bytes) -> FakeAdapter:
        release.wait(5)
        return store.read(digest)

    digest = store.add("a")
    tiers = make_tiers(read=slow_read)
    assert [tiers.want(digest) for _ in range(5)] == [None] * 5
    assert tiers.is_loading and tiers.poll() == []
    release.set()
    assert poll_until(tiers, 1) == [Loaded(digest, store.adapters[digest])]
    assert tiers.want(digest) is store.adapters[digest]
    assert store.reads == [digest] and not tiers.is_loading


def test_a_failed_load_says_why_and_can_be_tried_again(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    tiers = make_tiers()
    digest = digest_of("late")
    assert tiers.want(digest) is None
    (failure,) = poll_until(tiers, 1)
    assert failure == LoadFailed(digest, "the store has no such adapter")
    store.add("late")
    assert tiers.want(digest) is None
    assert isinstance(poll_until(tiers, 1)[0], Loaded)


def test_an_adapter_larger_than_all_pages_fails_with_the_mend(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    tiers = make_tiers(num_pages=2)
    tiers.want(store.add("huge", rank=33))
    (failure,) = poll_until(tiers, 1)
    assert isinstance(failure, LoadFailed)
    assert "rank 33" in failure.reason and "3 rank pages" in failure.reason
    assert "--lora-memory-bytes" in failure.reason
    assert tiers.held() == {}


def test_the_least_recently_wanted_copies_go_first(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    tiers = make_tiers(host_bytes=250)
    a, b, c = (store.add(name, nbytes=100) for name in "abc")
    for digest in (a, b):
        tiers.want(digest)
        poll_until(tiers, 1)
    assert tiers.want(a) is not None
    tiers.want(c)
    poll_until(tiers, 1)
    assert set(tiers.held()) == {a, c}
    assert tiers.want(b) is None, "it has to be read again"
    poll_until(tiers, 1)
    tiers.want(store.add("large", nbytes=1000))
    poll_until(tiers, 1)
    assert set(tiers.held()) == {digest_of("large")}, "one that is larger than the budget is kept, alone"


def test_what_the_system_says_of_a_path_stays_in_the_log(
    make_tiers: Callable[..., AdapterTiers], caplog: pytest.LogCaptureFixture
) -> None:
    def read(digest: bytes) -> FakeAdapter:
        raise PermissionError(13, "Permission denied", "/srv/store/secret")

    tiers = make_tiers(read=read)
    tiers.want(digest_of("a"))
    (failure,) = poll_until(tiers, 1)
    assert isinstance(failure, LoadFailed)
    assert failure.reason == "the adapter's files could not be read (Permission denied)"
    assert "/srv/store/secret" in caplog.text


def test_only_so_many_loads_are_under_way(store: FakeStore, make_tiers: Callable[..., AdapterTiers]) -> None:
    tiers = make_tiers()
    digests = [store.add(f"a{number}") for number in range(MAX_LOADS + 1)]
    for digest in digests:
        assert tiers.want(digest) is None
    poll_until(tiers, MAX_LOADS)
    assert digests[-1] not in tiers.held() and not tiers.is_loading
    assert tiers.want(digests[-1]) is None
    poll_until(tiers, 1)
