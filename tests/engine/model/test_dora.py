"""DoRA's gains against PEFT's own norms."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora.dora import DoraEmbeddingLayer, DoraLinearLayer

from engine.model import dora
from engine.model.dora import column_gains, row_gains


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every weight here is several, the last of them short."""
    monkeypatch.setattr(dora, "CHUNK_ROWS", 32)


@pytest.mark.parametrize("strength", [0.1, 3.0, 1000.0])
def test_gains_of_outputs_are_pefts(strength: float) -> None:
    torch.manual_seed(0)
    weight, a, b = torch.randn(75, 40), torch.randn(8, 40), torch.randn(75, 8) * strength
    magnitude = torch.rand(75) + 0.5
    norm = DoraLinearLayer(fan_in_fan_out=False).get_weight_norm(weight, b @ a, 0.7)
    torch.testing.assert_close(row_gains(magnitude, weight, a, b, 0.7), magnitude / norm - 1)


def test_gains_of_an_embedding_are_pefts() -> None:
    torch.manual_seed(0)
    table, a, b = torch.randn(75, 40), torch.randn(8, 75), torch.randn(40, 8)
    magnitude = torch.rand(40) + 0.5
    norm = DoraEmbeddingLayer(fan_in_fan_out=True).get_weight_norm(table, b @ a, 0.7)
    gains = column_gains(magnitude, table.split(dora.CHUNK_ROWS), a, b, 0.7)
    torch.testing.assert_close(gains, magnitude / norm - 1)


def test_an_update_that_nearly_undoes_the_weight_loses_no_precision() -> None:
    """‖W‖² plus its cross terms would cancel here, to nothing that is left of float32."""
    torch.manual_seed(0)
    b, a = torch.randn(40, 4), torch.randn(4, 50)
    weight = b @ a + 1e-5 * torch.randn(40, 50)
    expected = 1e-4 / (weight - b @ a).double().norm(dim=1) - 1
    gains = row_gains(torch.full((40,), 1e-4), weight, a, b, -1.0)
    torch.testing.assert_close(gains.double(), expected, rtol=0.02, atol=0.02)


def test_the_base_is_not_changed() -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 30)
    before = weight.clone()
    row_gains(torch.ones(40), weight, torch.randn(2, 30), torch.randn(40, 2), 1.0)
    assert torch.equal(weight, before)
