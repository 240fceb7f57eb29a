"""Norms and distances of updates against the updates themselves, formed and subtracted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import comparison
from adapters.comparison import changed_fields, compare, describe
from adapters.layout import AdapterLayout
from adapters.reader import read_layout
from tests.adapters.files import SHAPE, Tensors, config, tensors, write_adapter


def written(
    folder: Path, *modules: str, rank: int = 4, seed: int = 0, dtype: str = "F32", **changes: Any
) -> Path:
    entries: Tensors = {}
    for name, (_, shape, data) in tensors(*modules, rank=rank, seed=seed).items():
        values = np.frombuffer(data, "<f4")
        stored = {
            "F32": values,
            "F16": values.astype("<f2"),
            "BF16": (values.view("<u4") >> 16).astype("<u2"),
        }
        entries[name] = (dtype, shape, stored[dtype].tobytes())
    settings = config(r=rank, target_modules=list(modules or ("q_proj", "down_proj")), **changes)
    return write_adapter(folder, config_json=settings, weights=entries)


def layout(folder: Path) -> AdapterLayout:
    return read_layout(folder, SHAPE)


def update(folder: Path, module: str, layer: int) -> np.ndarray:
    """``scale * B A``, by the file's own bytes."""
    found = layout(folder).linear.get((layer, module))
    if found is None:
        in_features, out_features = SHAPE.modules[module]
        return np.zeros((out_features, in_features))
    raw = {}
    for side, stored in (("A", found.a), ("B", found.b)):
        data = (folder / stored.file).read_bytes()[stored.offset : stored.offset + stored.nbytes]
        match stored.dtype:
            case "BF16":
                values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
            case "F16":
                values = np.frombuffer(data, "<f2")
            case _:
                values = np.frombuffer(data, "<f4")
        raw[side] = values.astype(np.float64).reshape(stored.shape)
    return found.scale * raw["B"] @ raw["A"]


@pytest.mark.parametrize("dtypes", [("F32", "F32"), ("F16", "BF16")])
def test_norms_are_those_of_the_updates(
    tmp_path: Path, dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_COLUMNS", 10)
    before = written(tmp_path / "a", "q_proj", "down_proj", seed=1, dtype=dtypes[0])
    after = written(tmp_path / "b", "q_proj", "up_proj", rank=6, seed=2, dtype=dtypes[1], use_rslora=True)
    changes = {item.module: item for item in compare(layout(before), before, layout(after), after)}
    assert set(changes) == {"q_proj", "down_proj", "up_proj"}
    for module, change in changes.items():
        pairs = [(update(before, module, layer), update(after, module, layer)) for layer in range(2)]
        expected = (
            np.sqrt(sum((x**2).sum() for x, _ in pairs)),
            np.sqrt(sum((y**2).sum() for _, y in pairs)),
            np.sqrt(sum(((y - x) ** 2).sum() for x, y in pairs)),
        )
        assert (change.before, change.after, change.difference) == pytest.approx(expected, rel=1e-9)
    assert changes["up_proj"].before == 0 and changes["down_proj"].after == 0


def test_the_same_weights_are_no_distance_apart_whatever_their_rank(tmp_path: Path) -> None:
    before = written(tmp_path / "a", "q_proj", seed=3)
    entries = {}
    for name, (dtype, shape, data) in tensors("q_proj", seed=3).items():
        values = np.frombuffer(data, "<f4").reshape(shape)
        padding = [(0, 4), (0, 0)] if shape[0] == 4 else [(0, 0), (0, 4)]
        padded = np.pad(values, padding)
        entries[name] = (dtype, list(padded.shape), padded.tobytes())
    after = write_adapter(
        tmp_path / "b", config_json=config(r=8, lora_alpha=16, target_modules=["q_proj"]), weights=entries
    )
    [change] = compare(layout(before), before, layout(after), after)
    assert change.difference < 1e-6 * change.before
    changed = changed_fields(describe(layout(before)), describe(layout(after)))
    assert changed == {"ranks": {"from": [4], "to": [8]}}


def test_what_beside_numbers_differs_is_said(tmp_path: Path) -> None:
    before = written(tmp_path / "a", "q_proj")
    after = written(tmp_path / "b", "q_proj", dtype="BF16", lora_alpha=4)
    assert changed_fields(describe(layout(before)), describe(layout(after))) == {
        "scales": {"from": [2.0], "to": [1.0]},
        "dtypes": {"from": ["F32"], "to": ["BF16"]},
    }
    assert changed_fields({"a": 1}, {"b": 2}) == {"a": {"from": 1, "to": None}, "b": {"from": None, "to": 2}}
