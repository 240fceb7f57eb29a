"""Matrices of files arrive where they belong, rounded as torch rounds, and nothing beside them changes."""

from __future__ import annotations

import pytest
import torch

from kernels import native
from kernels.packing import SOURCE_DTYPES, MatrixCopy, copies_array, pack

SIZES = [(1, 1), (4, 50), (8, 576), (16, 64), (15, 17), (16, 3)]


def numbers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Of every size that the type has, subnormal ones and ties of rounding among them."""
    rng = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=rng) * 10.0 ** torch.randint(
        -7, 3, (rows, columns), generator=rng
    )
    x = x.to(dtype)
    special = torch.tensor(
        [0.0, -0.0, 6e-8, -5e-6, 1 + 2**-8, 1 + 3 * 2**-8, 65504.0, float("inf"), float("nan")]
    )
    if dtype != torch.float16:
        special = torch.cat((special, torch.tensor([1e-40, -1e-39, 3e38])))
    flat = x.view(-1)
    flat[: len(special)] = special.to(dtype)[: len(flat)]
    return x


@pytest.fixture(params=["compiled", "plain torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain torch":
        monkeypatch.setattr(native, "compiled", lambda dtype: None)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("source_dtype", SOURCE_DTYPES, ids=str)
def test_both_sides_of_every_type_and_size(
    dtype: torch.dtype, source_dtype: torch.dtype, turned: bool
) -> None:
    target = torch.full((len(SIZES), 18, 600), 7.0).to(dtype)
    expected, copies, data = target.clone(), [], b"\1"  # so nothing is aligned
    for i, (ranks, columns) in enumerate(SIZES):
        # The two last ranks of B stay out, as those do that belong to another page.
        stored = (
            numbers(columns, ranks + 2, source_dtype) if turned else numbers(ranks, columns, source_dtype)
        )
        matrix = stored.T[:ranks] if turned else stored
        expected[i, 1 : ranks + 1, 5 : columns + 5] = matrix.to(dtype)
        steps = (1, ranks + 2) if turned else (columns, 1)
        place = target[i, 1:, 5:]
        copies.append(
            MatrixCopy(
                1,
                len(data),
                SOURCE_DTYPES.index(source_dtype),
                ranks,
                columns,
                *steps,
                target=int(place.storage_offset()),
                target_step=place.stride(0),
            )
        )
        data += stored.view(torch.uint8).numpy().tobytes()
    files = [torch.zeros(1, dtype=torch.uint8), torch.frombuffer(bytearray(data), dtype=torch.uint8)]
    pack(files, copies_array(copies), target)
    torch.testing.assert_close(target, expected, rtol=0, atol=0, equal_nan=True)
    zeros = expected == 0
    assert torch.equal(target[zeros].signbit(), expected[zeros].signbit())


def test_no_copies_are_none(dtype: torch.dtype) -> None:
    target = torch.ones(3, dtype=dtype)
    pack([], copies_array([]), target)
    assert target.tolist() == [1, 1, 1]
