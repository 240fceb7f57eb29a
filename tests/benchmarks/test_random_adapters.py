"""The benchmark's adapters pass the same checks as a user's."""

from __future__ import annotations

from pathlib import Path

from adapters.base_model import BaseModelShape
from adapters.validation import validate
from benchmarks.random_adapters import MODULES, NUM_LAYERS, write_adapter


def test_they_are_valid_and_differ_by_seed(tmp_path: Path) -> None:
    shape = BaseModelShape(
        num_layers=NUM_LAYERS,
        modules={name.split(".")[1]: sizes for name, sizes in MODULES.items()},
        max_lora_rank=64,
    )
    digests = set()
    for seed in (0, 1):
        write_adapter(tmp_path / str(seed), rank=8, seed=seed)
        summary = validate(tmp_path / str(seed), shape)
        assert summary.rank == 8
        digests.add(summary.digest)
    assert len(digests) == 2
