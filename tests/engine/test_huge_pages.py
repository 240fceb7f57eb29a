"""Large pieces of host memory: zero whoever had them before, and never two owners'."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.adapter_tiers import MAX_LOADS
from engine.model import huge_pages

SIZES = (3 << 20, (3 << 20) + 5, 8 << 20)


@pytest.fixture(autouse=True)
def no_spares() -> None:
    huge_pages._spare.clear()


def test_what_is_given_back_is_given_out_again_and_zero() -> None:
    first = huge_pages.zeros(SIZES[0])
    address = first.data_ptr()
    first.fill_(7)
    view = first[100:]
    del first
    other = huge_pages.zeros(SIZES[0])
    assert other.data_ptr() != address, "a view still has it"
    del view
    again = huge_pages.zeros(SIZES[1])  # as many pages
    assert again.data_ptr() == address
    assert again.numel() == SIZES[1] and not again.any()


def test_empty_ones_are_given_out_as_they_are() -> None:
    first = huge_pages.zeros(SIZES[0]).fill_(7)
    address = first.data_ptr()
    del first
    again = huge_pages.empty(SIZES[0])
    assert again.data_ptr() == address and (again == 7).all()
    del again
    assert not huge_pages.zeros(SIZES[0]).any()


def test_few_are_kept() -> None:
    pieces = [huge_pages.zeros(SIZES[2]) for _ in range(9)]
    del pieces
    assert len(huge_pages._spare) == 8


def test_a_burst_of_loads_finds_the_memory_of_the_burst_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [huge_pages.empty(SIZES[2]) for _ in range(MAX_LOADS)]
    del pieces
    monkeypatch.setattr(huge_pages, "_new_piece", lambda nbytes: pytest.fail("memory from the system"))
    assert len([huge_pages.empty(SIZES[2]) for _ in range(MAX_LOADS)]) == MAX_LOADS


def test_large_ones_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MOST_SPARE_BYTES", SIZES[2])
    pieces = [huge_pages.zeros(size) for size in (SIZES[0], SIZES[2])]
    del pieces
    assert [len(piece) for piece in huge_pages._spare] in ([SIZES[2]], [4 << 20])
    huge_pages.zeros(SIZES[2] + 1)
    assert sum(map(len, huge_pages._spare)) <= SIZES[2]


def test_small_pieces_are_torch_s_own() -> None:
    assert huge_pages.taken_for(1000) == 1000
    assert not huge_pages.zeros(1000).any()
    assert huge_pages.taken_for(SIZES[1]) == 4 << 20


def test_threads_that_take_and_give_never_share_a_piece() -> None:
    faults: list[str] = []

    def work(mark: int) -> None:
        generator = torch.Generator().manual_seed(mark)
        for _ in range(60):
            size = SIZES[int(torch.randint(len(SIZES), (), generator=generator))]
            piece = huge_pages.zeros(size)
            if piece[:: 1 << 12].any():
                faults.append("not zero")
            piece[:: 1 << 12] = mark
            if not bool((piece[:: 1 << 12] == mark).all()):
                faults.append("another's")

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
