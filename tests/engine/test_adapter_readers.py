"""Places for reads: few at once, and none lost to a read that hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine import adapter_readers
from engine.adapter_readers import Readers


class Read(threading.Thread):
    """Has a place from `has_place` until it is told to `end`."""

    def __init__(self, readers: Readers) -> None:
        super().__init__(daemon=True)
        self._readers = readers
        self.has_place = threading.Event()
        self.end = threading.Event()
        self.start()

    def run(self) -> None:
        with self._readers.place():
            self.has_place.set()
            self.end.wait(20)


@contextmanager
def reads(readers: Readers, count: int) -> Iterator[list[Read]]:
    """So many reads that all have a place; they end with the context."""
    made = [Read(readers) for _ in range(count)]
    try:
        assert all(read.has_place.wait(60) for read in made)
        yield made
    finally:
        for read in made:
            read.end.set()
            read.join()


def test_who_comes_when_all_places_are_taken_waits_for_an_end() -> None:
    readers = Readers(2)
    with reads(readers, 2) as running:
        late = Read(readers)
        assert not late.has_place.wait(0.05)
        running[1].end.set()
        assert late.has_place.wait(60)
        late.end.set()
        late.join()


def test_reads_that_hang_keep_their_places_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_readers, "PATIENCE_S", 0.02)
    readers = Readers(2)
    with reads(readers, 2), reads(readers, 2) as running:
        monkeypatch.setattr(adapter_readers, "PATIENCE_S", 1000.0)
        late = Read(readers)
        assert not late.has_place.wait(0.05), "only what hangs has lost its place"
        running[0].end.set()
        assert late.has_place.wait(60), "and the place goes on to the next without another wait"
        late.end.set()
        late.join()


def test_a_read_that_goes_on_after_all_gives_back_nothing_that_is_another_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_readers, "PATIENCE_S", 0.02)
    readers = Readers(1)
    with reads(readers, 1) as hanging, reads(readers, 1) as running:
        monkeypatch.setattr(adapter_readers, "PATIENCE_S", 1000.0)
        hanging[0].end.set()
        hanging[0].join()
        late = Read(readers)
        assert not late.has_place.wait(0.05), "the place is the other's, who still reads"
        running[0].end.set()
        assert late.has_place.wait(60)
        late.end.set()
        late.join()


def test_a_read_that_fails_gives_its_place_back() -> None:
    readers = Readers(1)
    for _ in range(2):
        with pytest.raises(OSError), readers.place():
            raise OSError
