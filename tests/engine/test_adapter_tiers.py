"""The tiers below the device: loads, their faults, and the budget of host memory."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from builders import FakeAdapter, FakeStore, digest_of

from adapters.blob_store import BlobNotFound, CorruptBlob, StoreUnavailable
from engine import adapter_counters, adapter_tiers
from engine.adapter_tiers import (
    MAX_AHEAD,
    MAX_HANGING,
    MAX_LOADS,
    NUM_LOAD_THREADS,
    AdapterTiers,
)
from engine.load_outcomes import Loaded, LoadFailed


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def make_tiers(store: FakeStore) -> Iterator[Callable[..., AdapterTiers]]:
    made: list[AdapterTiers] = []

    def make(
        host_bytes: int = 1000, num_pages: int = 4, read: Callable | None = None, **options: Any
    ) -> AdapterTiers:
        made.append(
            AdapterTiers(
                read or store.read,
                is_local=store.is_local,
                discard=store.discard,
                num_pages=num_pages,
                host_bytes=host_bytes,
                **options,
            )
        )
        return made[-1]

    yield make
    for tiers in made:
        tiers.close()


def poll_until(tiers: AdapterTiers, count: int) -> list[Loaded | LoadFailed]:
    outcomes: list[Loaded | LoadFailed] = []
    deadline = time.monotonic() + 60
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
        release.wait(60)
        return store.read(digest)

    digest = store.add("a")
    tiers = make_tiers(read=slow_read)
    assert [tiers.want(digest) for _ in range(5)] == [None] * 5
    assert tiers.is_loading and tiers.poll() == []
    release.set()
    (loaded,) = poll_until(tiers, 1)
    assert isinstance(loaded, Loaded) and loaded.copy == store.adapters[digest]
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


def failure_by(make_tiers: Callable[..., AdapterTiers], error: Exception) -> LoadFailed:
    """How a load ends whose read raises an error."""

    def read(digest: bytes) -> FakeAdapter:
        raise error

    tiers = make_tiers(read=read)
    tiers.want(digest_of("a"))
    (failure,) = poll_until(tiers, 1)
    assert isinstance(failure, LoadFailed)
    return failure


def test_what_the_system_says_of_a_path_stays_in_the_log(
    make_tiers: Callable[..., AdapterTiers], caplog: pytest.LogCaptureFixture
) -> None:
    failure = failure_by(make_tiers, PermissionError(13, "Permission denied", "/srv/store/secret"))
    assert failure.reason == "the adapter's files could not be read (Permission denied)"
    assert "/srv/store/secret" in caplog.text


@pytest.mark.parametrize(
    ("error", "later"),
    [
        (StoreUnavailable("The bucket does not answer."), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (CorruptBlob("The file is corrupt."), False),
        (BlobNotFound(bytes(32)), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (OSError("the adapter is larger than the cache"), False),
        (ValueError("no adapter"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_store_that_is_away_is_told_from_what_it_keeps(
    make_tiers: Callable[..., AdapterTiers], error: Exception, later: bool
) -> None:
    assert failure_by(make_tiers, error).may_be_read_later is later


@pytest.mark.parametrize("error", [CorruptBlob("The file f is corrupt."), BlobNotFound(bytes(32))])
def test_who_asks_for_a_damaged_adapter_is_told_what_mends_it(
    make_tiers: Callable[..., AdapterTiers], error: Exception
) -> None:
    assert failure_by(make_tiers, error).reason.endswith("upload them again")


def test_reads_that_hang_keep_no_other_tenant_from_its_own(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    """A tenant's share falls as others come, and nobody's falls to nothing."""
    release = threading.Event()

    def read(digest: bytes) -> FakeAdapter:
        if digest in hanging:
            release.wait(60)
        return store.read(digest)

    tiers = make_tiers(host_bytes=10_000, read=read)
    names = [f"{tenant}{number}" for tenant in "abcdef" for number in range(2 * MAX_LOADS)]
    hanging = {store.add(name) for name in names}
    for name in names:
        tiers.want(digest_of(name), name[0])
    tiers.check()
    under_way = tiers.loading()
    counts = [sum(digest_of(name) in under_way for name in names if name[0] == tenant) for tenant in "abcdef"]
    assert counts == [MAX_LOADS, 3, 2, 1, 1, 1] and sum(counts) < NUM_LOAD_THREADS
    mine = [store.add(f"mine{number}") for number in range(5)]
    for digest in mine:
        tiers.want(digest, "mine")
        poll_until(tiers, 1)
    release.set()
    wait_until_read(tiers)
    assert set(tiers.held()) == {*under_way, *mine}
    assert tiers.want(digest_of("a11"), "a") is None and tiers.is_loading, "all places are free again"


def test_who_waits_for_a_read_that_hangs_is_told_and_the_read_is_taken_when_it_ends(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_tiers, "READ_SECONDS", 0.02)
    release = threading.Event()

    def read(digest: bytes) -> FakeAdapter:
        release.wait(60)
        return store.read(digest)

    tiers = make_tiers(read=read)
    digest = store.add("a")
    store.local.add(digest)
    tiers.want(digest)
    failure = poll_until(tiers, 1)[0]
    assert isinstance(failure, LoadFailed) and "could not be read in" in failure.reason
    assert failure.may_be_read_later
    assert tiers.poll() == [], "once is enough where nobody waits"
    assert tiers.want(digest) is None and tiers.loading() == [digest], "no second read begins"
    assert tiers.poll(lambda _: 1) == [failure], "who waits now is told as well"
    assert tiers.counters.loads_failed == 1
    release.set()
    assert isinstance(poll_until(tiers, 1)[0], Loaded)
    assert store.reads == [digest] and tiers.want(digest) is not None


def test_a_store_that_is_far_away_may_take_as_long_as_it_takes(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_tiers, "READ_SECONDS", 0.0)
    begun, release = threading.Event(), threading.Event()

    @contextmanager
    def fetch(digest: bytes) -> Iterator[bytes]:
        begun.set()
        release.wait(60)
        yield digest

    tiers = make_tiers(fetch=fetch)
    digest = store.add("a")
    tiers.want(digest)
    assert begun.wait(60)
    assert tiers.poll(lambda _: 1) == []
    monkeypatch.undo()
    release.set()
    assert isinstance(poll_until(tiers, 1)[0], Loaded)


def test_to_wait_for_a_place_is_no_read_that_hangs(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_tiers, "READ_SECONDS", 0.0)
    waits, has_place, reads, release = (threading.Event() for _ in range(4))

    @contextmanager
    def place() -> Iterator[None]:
        waits.set()
        has_place.wait(60)
        yield

    def read(digest: bytes) -> FakeAdapter:
        reads.set()
        release.wait(60)
        return store.read(digest)

    tiers = make_tiers(read=read, place=place)
    digest = store.add("a")
    store.local.add(digest)
    tiers.want(digest)
    assert waits.wait(60)
    assert tiers.poll(lambda _: 1) == []
    has_place.set()
    assert reads.wait(60)
    assert [outcome.digest for outcome in tiers.poll(lambda _: 1)] == [digest], "now it is read, and hangs"
    release.set()


class Hanging:
    """Tiers over a local disk on which reads of adapters h0, h1, ... hang until they `end`."""

    def __init__(self, store: FakeStore, make_tiers: Callable[..., AdapterTiers]) -> None:
        self._store = store
        self._slow = [store.add(f"h{number}") for number in range(NUM_LOAD_THREADS)]
        store.local.update(self._slow)
        self._released, self._ends_well = threading.Event(), True
        self.tiers = make_tiers(host_bytes=10_000, read=self._read)

    def _read(self, digest: bytes) -> FakeAdapter:
        if digest in self._slow:
            self._released.wait(60)
            if not self._ends_well:
                raise OSError(5, "Input/output error")
        return self._store.read(digest)

    def tell(self, count: int) -> list[Loaded | LoadFailed]:
        """As if the time had passed after which so many of them are told."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter_tiers, "READ_SECONDS", 0.0)
            return poll_until(self.tiers, count)

    def end(self, *, well: bool = True) -> None:
        self._ends_well = well
        self._released.set()


@pytest.fixture
def hanging(store: FakeStore, make_tiers: Callable[..., AdapterTiers]) -> Iterator[Hanging]:
    hanging = Hanging(store, make_tiers)
    yield hanging
    hanging.end()


def test_reads_that_hang_keep_nobody_from_beginning_ahead_while_threads_are_left(
    store: FakeStore, hanging: Hanging
) -> None:
    tiers = hanging.tiers

    def lets_ahead() -> bool:
        return tiers.lets_ahead(lambda digest: 0)

    for number in range(MAX_AHEAD):
        tiers.begin(digest_of(f"h{number}"))
    assert tiers.poll() == [] and not lets_ahead(), "they may still end at once"
    hanging.tell(MAX_AHEAD)
    for number in range(MAX_AHEAD, MAX_HANGING):
        assert lets_ahead()
        tiers.begin(digest_of(f"h{number}"))
        hanging.tell(1)
    assert not lets_ahead(), "the threads that are left are for requests"
    late = store.add("late")
    tiers.begin(late)
    assert not tiers.is_loading_one(late)
    tiers.want(late, "somebody")
    assert isinstance(poll_until(tiers, 1)[0], Loaded)


@pytest.mark.parametrize("well", [True, False])
def test_a_read_that_hangs_has_failed_once_however_it_ends(hanging: Hanging, well: bool) -> None:
    tiers, digest = hanging.tiers, digest_of("h0")
    tiers.want(digest)
    assert tiers.hanging(digest) is None
    assert [outcome.digest for outcome in hanging.tell(1)] == [digest]
    assert tiers.hanging(digest) is not None
    hanging.end(well=well)
    (ended,) = poll_until(tiers, 1)
    assert isinstance(ended, Loaded if well else LoadFailed)
    assert tiers.counters.loads_failed == 1 and tiers.hanging(digest) is None


def test_it_is_known_when_a_read_may_hang(hanging: Hanging) -> None:
    tiers = hanging.tiers
    assert tiers.next_look is None
    before = time.monotonic()
    tiers.want(digest_of("h0"))
    assert tiers.next_look is not None
    assert before <= tiers.next_look - adapter_tiers.READ_SECONDS <= time.monotonic()
    hanging.tell(1)
    assert tiers.next_look is None, "there is nothing more to tell"


def test_only_so_many_loads_are_under_way(store: FakeStore, make_tiers: Callable[..., AdapterTiers]) -> None:
    tiers = make_tiers()
    digests = [store.add(f"a{number}") for number in range(MAX_LOADS + 1)]
    for digest in digests:
        assert tiers.want(digest) is None
    poll_until(tiers, MAX_LOADS)
    assert digests[-1] not in tiers.held() and not tiers.is_loading
    assert tiers.want(digests[-1]) is None
    poll_until(tiers, 1)


def wait_until_read(tiers: AdapterTiers) -> None:
    """Waits for loads and what is being forgotten to end."""
    deadline = time.monotonic() + 60
    while tiers.is_loading and time.monotonic() < deadline:
        tiers.poll()
        tiers.check()
        time.sleep(0.001)
    assert not tiers.is_loading


def test_a_load_that_has_not_begun_can_be_dropped(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    release = threading.Event()
    begun = threading.Semaphore(0)

    def slow_read(digest: bytes) -> FakeAdapter:
        begun.release()
        release.wait(60)
        return store.read(digest)

    tiers = make_tiers(host_bytes=10_000, read=slow_read)
    digests = [store.add(f"a{number}") for number in range(NUM_LOAD_THREADS + 2)]
    for digest in digests:
        tiers.want(digest, f"tenant of {digest!r}")
    for _ in range(NUM_LOAD_THREADS):
        begun.acquire()
    for digest in digests:
        tiers.cancel(digest)
    assert tiers.loading() == digests[:NUM_LOAD_THREADS], "what is being read goes on"
    assert tiers.counters.loads_cancelled == 2
    tiers.check()
    assert tiers.want(digests[-1], "new") is None and tiers.is_loading_one(digests[-1]), (
        "it can be wanted again"
    )
    release.set()
    wait_until_read(tiers)
    assert set(tiers.held()) == {*digests[:NUM_LOAD_THREADS], digests[-1]}
    assert sorted(store.reads) == sorted(tiers.held())


def test_to_forget_takes_the_copy_on_the_local_disk_too(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    tiers = make_tiers()
    digest = store.add("a")
    tiers.want(digest)
    wait_until_read(tiers)
    assert store.local == {digest} and tiers.host_bytes == 100
    tiers.forget(digest)
    assert not tiers.has(digest) and tiers.host_bytes == 0
    if tiers.is_loading:
        assert tiers.want(digest) is None and tiers.loading() in ([], [digest])
    wait_until_read(tiers)
    assert store.local <= {digest}
    tiers.want(digest)
    wait_until_read(tiers)
    assert tiers.counters.history(digest).loads == len(store.reads), "each load made one copy"


def test_loads_are_counted_by_where_they_came_from(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    tiers = make_tiers()
    digest = store.add("a")
    for _ in range(3):
        tiers.want(digest)
        wait_until_read(tiers)
        tiers.discard(digest)
    tiers.want(digest_of("missing"))
    wait_until_read(tiers)
    counters = tiers.counters
    assert (counters.loads_store, counters.loads_disk, counters.loads_failed) == (1, 2, 1)
    assert counters.history(digest).loads == 3 and counters.load_seconds_disk > 0


@pytest.mark.parametrize("waited_first", [False, True])
def test_what_is_read_ahead_does_not_push_out_what_a_sequence_waits_for(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers], waited_first: bool
) -> None:
    """Room for one copy; both have ended by one look, and what is read for nobody is pinned."""
    tiers = make_tiers(host_bytes=100)
    waited, ahead = store.add("waited"), store.add("ahead")
    tiers.pin([ahead])
    for digest in (waited, ahead) if waited_first else (ahead, waited):
        ended = tiers._done.qsize() + 1
        tiers.want(digest)
        while tiers._done.qsize() < ended:
            time.sleep(0.001)
    tiers.poll(lambda digest: digest == waited)
    assert list(tiers.held()) == [waited] and tiers.host_bytes == 100
    tiers.check()


def test_pinned_copies_go_last(store: FakeStore, make_tiers: Callable[..., AdapterTiers]) -> None:
    tiers = make_tiers(host_bytes=300)
    digests = [store.add(f"a{number}", nbytes=100) for number in range(6)]
    tiers.pin(frozenset(digests[:2]))
    for digest in digests:
        tiers.want(digest)
        wait_until_read(tiers)
    assert set(tiers.held()) == {*digests[:2], digests[-1]}
    assert tiers.counters.evictions_host == 3


def test_host_memory_follows_what_is_there_and_not_what_has_been(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_counters, "MAX_HISTORIES", 30)
    tiers = make_tiers(host_bytes=1000)
    for number in range(100):
        tiers.want(store.add(f"a{number}", nbytes=100))
        wait_until_read(tiers)
    assert len(tiers.held()) == 10 and len(tiers._order._used) == 10
    assert len(tiers.counters.histories) == 30


def test_what_another_thread_begins_is_a_load_like_others(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    release = threading.Event()

    def slow_read(digest: bytes) -> FakeAdapter:
        release.wait(60)
        return store.read(digest)

    tiers = make_tiers(read=slow_read)
    digests = [store.add(name) for name in "abcdefgh"]
    for digest in digests:
        tiers.begin(digest)
        tiers.begin(digest)
    assert tiers.is_loading_one(digests[0])
    assert tiers.want(digests[0]) is None
    assert tiers.loading() == digests[: MAX_LOADS // 2], "and half of the loads are kept for the loop's own"
    tiers.forget(digests[-1])
    tiers.begin(digests[-1])
    release.set()
    assert {outcome.digest for outcome in poll_until(tiers, MAX_LOADS // 2)} == set(tiers.held())
    tiers.begin(digests[0])
    assert sorted(store.reads) == sorted(digests[: MAX_LOADS // 2]), "each is read once"
    tiers.check()


def test_threads_that_begin_loads_while_the_loop_takes_them_in_leave_nothing_behind(
    store: FakeStore, make_tiers: Callable[..., AdapterTiers]
) -> None:
    tiers = make_tiers(host_bytes=300)
    digests = [store.add(f"adapter-{number}") for number in range(8)]
    ended = threading.Event()

    def begin() -> None:
        while not ended.is_set():
            for digest in digests:
                tiers.begin(digest)

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(300):
        tiers.want(digests[turn % 8])
        tiers.poll()
        tiers.check()
        if turn % 5 == 0 and digests[0] not in tiers.loading():
            tiers.forget(digests[0])
    ended.set()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 60
    while tiers.is_loading:
        assert time.monotonic() < deadline, "a load is under way for ever"
        tiers.poll()
    tiers.check()
