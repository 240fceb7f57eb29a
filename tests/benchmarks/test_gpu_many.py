"""What the GPU's benchmark of many adapters does on the host: its adapters, and its sums."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from adapters.weight_files import read_tensors
from benchmarks import gpu_many
from benchmarks.gpu_many import Adapters, Size, Tally
from engine.outputs import Finished, LinkOutput
from engine.sequence import FinishReason


def test_some_adapters_have_weights_of_their_own_and_the_others_share_these(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, Size(adapters=5, files=2))
    adapters.begin()
    store = adapters.store()
    hashes, tensors = [], []
    for digest in adapters.digests:
        with store.reading(digest) as folder:
            hashes.append(hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).digest())
            tensors.append(read_tensors(folder))
            assert (folder / "adapter_config.json").is_file()
    assert hashes == [hashes[0], hashes[1], hashes[0], hashes[1], hashes[0]] and hashes[0] != hashes[1]
    assert {len(own) for own in tensors} == {32 * 4 * 2}


def test_the_time_in_which_all_seats_are_taken_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(gpu_many.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(gpu_many, "MAX_NUM_SEQS", 4)
    tally = Tally()
    assert tally.figures() == {}
    for second in range(1, 11):
        now[0] = float(second)
        tally.note_seats(gpu_many.MAX_NUM_SEQS if second >= 4 else 3)
        ends = [Finished(second, 0, FinishReason.LENGTH)] if second in (2, 3, 9) else []
        tally.deliver({"bench": LinkOutput(tokens=[0] * second, finished=ends)})
        if second <= 8:
            tally.last_sent = now[0]
    figures = tally.figures()
    assert figures["sustained"] == (5 + 6 + 7 + 8) / 4 and figures["sustained_seconds"] == 4.0
    assert figures["whole"] == 5.5 and tally.num_ended == 3 and figures["step_ms"] == 1000.0
