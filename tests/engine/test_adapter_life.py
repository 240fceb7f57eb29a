"""Adapters that come, go and come back under requests, on the real engine: faults that others have had."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from benchmarks import machine
from engine.model.loading import LoadedModel, load_model
from engine.sequence import Sequence
from tests.adapter_kinds import ENDS, VECTORS, save_kind
from tests.engine.live_engine import LiveEngine, digest_of, live_engine
from tests.model_zoo import save_adapter, save_tiny_model

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = {"a1": 16, "a2": 12, "a3": 8, "a4": 16, "wide": 64, "narrow": 8}
KINDS = {"dora": VECTORS["dora r16 over patterns"], "ends": ENDS["saved"]}

Make = Callable[..., AbstractContextManager[LiveEngine]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoadedModel, dict[str, Path]]]:
    # So small a model gains nothing from a second thread, and on a busy machine each barrier waits for it.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("life")
    hf_model = save_tiny_model(root / "model")
    folders = {
        name: save_adapter(hf_model, root / name, rank=rank, targets=LINEAR, seed=index)
        for index, (name, rank) in enumerate(RANKS.items())
    }
    folders |= {name: save_kind(hf_model, root / name, kind, seed=7) for name, kind in KINDS.items()}
    model = load_model(str(root / "model"), dtype="float32", device="cpu", max_model_len=None)
    yield model, folders
    torch.set_num_threads(threads)


@pytest.fixture
def make(made: tuple[LoadedModel, dict[str, Path]], tmp_path: Path) -> Make:
    """Makes engines, each with a disk of its own."""
    model, folders = made
    count = iter(range(100))
    return lambda **sizes: live_engine(model, folders, tmp_path / f"disk-{next(count)}", **sizes)


def prompt(number: int, length: int = 12) -> list[int]:
    return [3 + (7 * number + 13 * index) % 300 for index in range(length)]


def answer(make: Make, adapter: str | None, tokens: list[int], max_tokens: int) -> list[int]:
    """What an engine that does nothing else answers."""
    with make(num_pages=8) as engine:
        engine.submit(1, adapter, tokens, max_tokens)
        engine.run()
        return engine.tokens[1, 0]


def test_loads_beside_two_long_decodes_change_nothing_of_them(make: Make) -> None:
    """Two pages' worth of room: a3 and a4 can only come in the pages of a1 and a2."""
    expected = {name: answer(make, name, prompt(index), 150) for index, name in enumerate(("a1", "a2"))}
    others = {name: answer(make, name, prompt(9), 4) for name in ("a3", "a4")}
    with make(num_pages=2) as engine:
        engine.submit(1, "a1", prompt(0), 150)
        engine.submit(2, "a2", prompt(1), 150)
        engine.until(lambda: len(engine.finished) == 0 and engine.scheduler.num_running == 2)
        number, last = 10, {}
        while not {(1, 0), (2, 0)} <= engine.finished.keys():
            for name in ("a3", "a4"):
                if last.get(name, (0, 0)) in engine.finished or name not in last:
                    number += 1
                    last[name] = (number, 0)
                    engine.gate.unload(digest_of(name))  # so that it is fetched and read anew
                    engine.prefetch(name)
                    engine.submit(number, name, prompt(9), 4)
            engine.step()
        engine.run()
        assert engine.tokens[1, 0] == expected["a1"] and engine.tokens[2, 0] == expected["a2"]
        for key in engine.finished.keys() - {(1, 0), (2, 0)}:
            assert engine.tokens[key] in others.values()
        counters = engine.tiers.counters
        assert counters.evictions_device >= 5 and counters.yields >= 5, "the pages have changed hands"
        engine.check_all_free()


def test_unload_of_an_idle_adapter_frees_every_tier(make: Make) -> None:
    with make(num_pages=8) as engine:
        for name in ("a1", "a2", "wide"):
            engine.prefetch(name)
        engine.run()
        engine.check_tiers_agree(["a1", "a2", "wide"])
        engine.gate.unload(digest_of("wide"))
        engine.run()
        engine.check_tiers_agree(["a1", "a2"])


def test_unload_under_a_stream_waits_for_its_end(make: Make) -> None:
    expected = answer(make, "a2", prompt(1), 40)
    with make(num_pages=8) as engine:
        for name in ("a1", "a2", "a3"):
            engine.prefetch(name)
        engine.run()
        engine.submit(1, "a2", prompt(1), 40)
        engine.until(lambda: len(engine.tokens.get((1, 0), ())) >= 5)
        engine.gate.unload(digest_of("a2"))
        engine.step()
        engine.check_tiers_agree(["a1", "a2", "a3"])
        assert engine.references("a2") == 1
        engine.run()
        assert engine.tokens[1, 0] == expected
        engine.run()
        engine.check_tiers_agree(["a1", "a3"])


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_unload_that_races_a_load_leaves_nothing_behind(make: Make, is_waited_for: bool) -> None:
    with make(num_pages=8) as engine:
        for name in ("a1", "a2"):
            engine.prefetch(name)
        engine.run()
        reading, release = threading.Event(), threading.Event()
        engine.before_read = lambda: (reading.set(), release.wait(30))
        engine.submit(1, "a3", prompt(1), 5)
        engine.step()
        assert reading.wait(30)
        engine.gate.unload(digest_of("a3"))
        if not is_waited_for:
            engine.scheduler.abort("link", 1)
        engine.step()
        release.set()
        engine.run()
        assert engine.finished[1, 0] == ("LENGTH" if is_waited_for else "ABORTED")
        engine.run()
        engine.check_tiers_agree(["a1", "a2"])


def test_a_reload_makes_one_copy(make: Make) -> None:
    expected = answer(make, "a1", prompt(2), 8)
    with make(num_pages=8) as engine:
        engine.prefetch("a1")
        engine.run()
        engine.gate.unload(digest_of("a1"))
        for number in range(3):
            engine.submit(number, "a1", prompt(2), 8)
            engine.prefetch("a1")
        engine.run()
        assert engine.store.fetched.count(digest_of("a1")) <= 2 and engine.tiers.counters.copies <= 2
        engine.check_tiers_agree(["a1"])
        assert [engine.tokens[number, 0] for number in range(3)] == [expected] * 3
        engine.gate.unload(digest_of("a1"))
        engine.run()
        engine.submit(9, "a1", prompt(2), 8)
        engine.run()
        engine.check_tiers_agree(["a1"])
        assert engine.tokens[9, 0] == expected
        loads = engine.gate.status(digest_of("a1")).history.loads
        assert loads == engine.tiers.counters.loads_store == engine.store.fetched.count(digest_of("a1"))


def test_what_lies_beside_the_pages_goes_with_its_adapter(make: Make) -> None:
    with make(num_pages=8) as engine:
        for name in ("ends", "a1"):
            engine.prefetch(name)
            engine.run()
        beside = engine.runner._ends._by_page
        adapter = engine.pages.resident(digest_of("ends"))
        assert adapter is not None and list(beside) == [adapter.pages[0]]
        engine.gate.unload(digest_of("ends"))
        engine.run()
        assert not beside
        engine.check_tiers_agree(["a1"])


def test_memory_is_flat_over_loads_and_unloads(make: Make) -> None:
    names = ["a1", "a2", "a3", "a4", "wide", "narrow", *KINDS]
    with make(num_pages=8) as engine:
        resident = []
        for count in range(401):
            if count in (100, 400):
                resident.append(machine.memory(os.getpid()))
            name = names[count % len(names)]
            engine.prefetch(name)
            engine.run()
            assert engine.on_device() == {digest_of(name)}
            engine.gate.unload(digest_of(name))
            engine.run()
        engine.check_tiers_agree([])
        # A copy is 0.2 to 0.9 MB: 300 that stayed would be a hundred.
        assert resident[1] - resident[0] < 10e6


def test_references_of_many_choices_return_to_zero(make: Make) -> None:
    with make(num_pages=8, max_num_seqs=48) as engine:
        for number in range(3):
            engine.submit(number, "a1", prompt(number, 20), 6 + number, n=16)
        engine.until(lambda: engine.scheduler.num_running == 48)
        assert engine.references("a1") == 48
        engine.gate.unload(digest_of("a1"))
        engine.run()
        assert len(engine.finished) == 48 and set(engine.finished.values()) == {"LENGTH"}
        engine.run()
        engine.check_tiers_agree([])
        engine.check_all_free()
        for name in ("a1", "a2"):
            engine.prefetch(name)
        engine.run()
        for number, name in ((10, "a1"), (11, "a2")):
            engine.submit(number, name, prompt(number, 20), 12, n=4)
        engine.until(lambda: engine.scheduler.num_running == 8)
        assert (engine.references("a1"), engine.references("a2")) == (4, 4)
        engine.scheduler.abort("link", 10, 2)
        engine.step()
        assert (engine.references("a1"), engine.references("a2")) == (3, 4)
        engine.run()
        assert (engine.references("a1"), engine.references("a2")) == (0, 0)
        engine.check_all_free()


def test_streams_that_disconnect_and_are_aborted_in_each_state_leave_nothing(make: Make) -> None:
    """30 on one adapter, most of them queued; half disconnect, the others are aborted in each state."""
    with make(num_pages=4, max_num_seqs=6, max_num_batched_tokens=24) as engine:
        for number in range(30):
            link = f"link-{number % 2}"
            choices = 3 if number % 5 == 0 else 1
            engine.submit(number, "a1", prompt(number, 20 + number), 60, n=choices, link=link)
        engine.scheduler.abort("link-1", 29)  # before its adapter is here
        engine.until(lambda: engine.scheduler.num_running > 0)
        states = {"attached", "prefilling", "decoding", "waiting"}
        for _ in range(400):
            for seq in list(engine.scheduler._roster):
                if seq.request.link == "link-1" and state_of(seq) in states:
                    states.discard(state_of(seq))
                    engine.scheduler.abort("link-1", seq.request.request_id, seq.choice)
            engine.step()
            if not states:
                break
        assert not states, "each state was met"
        engine.scheduler.abort_link("link-0")
        engine.step()
        assert not [seq for seq in engine.scheduler._roster if seq.request.link == "link-0"]
        for number in range(1, 30, 2):
            engine.scheduler.abort("link-1", number)
        engine.step()
        assert engine.scheduler.num_running + engine.scheduler.num_waiting == 0
        assert engine.references("a1") == 0
        engine.check_all_free()
        engine.submit(99, "a1", prompt(3), 5)
        engine.run()
        assert engine.tokens[99, 0] == answer(make, "a1", prompt(3), 5), "and the engine serves as before"


def state_of(seq: Sequence) -> str:
    if seq.status.value != "running":
        return seq.status.value
    return "decoding" if len(seq.tokens) > seq.num_prompt else "prefilling"


@pytest.mark.parametrize(
    ("before", "after"), [("wide", "narrow"), ("dora", "narrow"), ("ends", "narrow"), ("wide", "dora")]
)
def test_pages_that_were_anothers_answer_as_new_ones(make: Make, before: str, after: str) -> None:
    expected = answer(make, after, prompt(5), 24)
    base = answer(make, None, prompt(5), 24)
    with make(num_pages=4) as engine:
        engine.submit(1, before, prompt(5), 24)
        engine.run()
        used = engine.pages.resident(digest_of(before))
        assert used is not None and engine.tokens[1, 0] != expected
        # What stays in all pages is the former's: nobody else was here.
        engine.gate.unload(digest_of(before))
        engine.run()
        for number in range(2, 6):
            engine.submit(number, after, prompt(5), 24)
            engine.submit(10 * number, None, prompt(5), 24)
            engine.run()
            assert engine.tokens[number, 0] == expected and engine.tokens[10 * number, 0] == base
            now = engine.pages.resident(digest_of(after))
            assert now is not None and set(now.pages) & set(used.pages), "the same pages"
            engine.gate.unload(digest_of(after))
            engine.run()
            engine.submit(100 * number, before, prompt(5), 3)
            engine.run()
            engine.gate.unload(digest_of(before))
            engine.run()
