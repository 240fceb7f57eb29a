"""The benchmark's adapters pass the same checks as a user's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from adapters.base_model import BaseModelShape
from adapters.validation import validate
from benchmarks.random_adapters import ATTENTION, MODULES, NUM_LAYERS, draw, write_adapter


@pytest.mark.parametrize("modules", [ATTENTION, tuple(MODULES)])
def test_they_are_valid_and_differ_by_seed(tmp_path: Path, modules: tuple[str, ...]) -> None:
    shape = BaseModelShape(
        num_layers=NUM_LAYERS,
        modules={name.split(".")[1]: sizes for name, sizes in MODULES.items()},
        max_lora_rank=64,
    )
    digests = set()
    for seed in (0, 1):
        write_adapter(tmp_path / str(seed), rank=8, seed=seed, modules=modules)
        summary = validate(tmp_path / str(seed), shape)
        assert summary.rank == 8
        digests.add(summary.digest)
    assert len(digests) == 2


def test_requests_name_all_adapters_alike_or_the_first_most() -> None:
    alike = Counter(draw(10, 10_000, zipf=False, seed=1))
    by_zipf = Counter(draw(10, 10_000, zipf=True, seed=1))
    assert alike.keys() == by_zipf.keys() == set(range(10))
    assert max(alike.values()) < 1.2 * min(alike.values())
    assert 1.8 < by_zipf[0] / by_zipf[1] < 2.2 and 8 < by_zipf[0] / by_zipf[9] < 12
