"""The Triton sampling kernels, interpreted on the CPU, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.gpu.sampling import sample
from kernels.sampling_batch import AllowedTokens, SamplingBatch, TokenEdits

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has them compiled")


def make_batch(rows: int, **values: float) -> SamplingBatch:
    def full(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), values.get(name, default), dtype=dtype)

    return SamplingBatch(
        temperature=full("temperature", 1.0),
        top_k=full("top_k", 0, torch.int32),
        top_p=full("top_p", 1.0),
        min_p=full("min_p", 0.0),
        seeds=torch.randint(-(2**62), 2**62, (rows,)),
        positions=torch.randint(0, 1 << 20, (rows,)),
    )


def check(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    got, want = sample(logits, batch), reference.sample(logits, batch)
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.finite.tolist() == want.finite.tolist()
    return got.tokens


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
def test_greedy_takes_the_lowest_of_equal_logits(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size).to(dtype)
    logits[0] = 1.0
    logits[1, vocab_size - 1] = logits[1, vocab_size // 2] = 50.0
    batch = make_batch(4, temperature=0.0)
    assert check(logits, batch).tolist()[:2] == [0, vocab_size // 2]
    check(logits, replace(batch, all_greedy=True))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.6},
        {"top_p": 0.0},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7},
    ],
)
def test_draws_equal_the_reference(values: dict[str, float]) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(12, 700) * 3).half()
    check(logits, make_batch(12, **values))


def test_rows_of_every_kind_in_one_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 300)
    batch = replace(
        make_batch(5),
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.0, 2.0]),
        top_k=torch.tensor([3, 5, 0, 299, 400], dtype=torch.int32),
        top_p=torch.tensor([0.5, 1.0, 0.3, 0.9, 1.0]),
    )
    check(logits, batch)


def test_top_k_keeps_equal_logits_together() -> None:
    logits = torch.full((64, 40), -1.0)
    logits[:, [3, 9, 20]] = 2.0
    tokens = check(logits, make_batch(64, top_k=2))
    assert set(tokens.tolist()) == {3, 9, 20}


def test_rows_that_are_not_finite_are_reported_alone() -> None:
    torch.manual_seed(3)
    logits = torch.randn(5, 5000)
    logits[0, 4999] = float("nan")
    logits[1, 2] = float("inf")
    logits[2] = float("-inf")
    logits[3, :4000] = float("-inf")
    for temperature in (0.0, 1.0):
        batch = make_batch(5, temperature=temperature, top_p=0.9)
        check(logits, batch)
        assert sample(logits, batch).finite.tolist() == [False, False, False, True, True]


def test_edits() -> None:
    torch.manual_seed(4)
    logits = torch.randn(4, 50)
    entries = [(r, t) for r in range(3) for t in range(0, 50, 3)] + [(3, t) for t in range(50)]
    size = len(entries) + 2
    edits = TokenEdits(
        rows=torch.tensor([r for r, _ in entries] + [-1, -1], dtype=torch.int32),
        tokens=torch.tensor([t for _, t in entries] + [0, 7], dtype=torch.int32),
        biases=torch.where(torch.rand(size) < 0.3, float("-inf"), torch.randn(size)),
        counts=torch.randint(0, 3, (size,), dtype=torch.int32),
        seen=torch.rand(size) < 0.5,
        presence=torch.tensor([0.0, 0.5, -0.5, 0.0]),
        frequency=torch.tensor([0.3, 0.0, 1.5, 0.0]),
        repetition=torch.tensor([1.0, 1.3, 0.8, 1.0]),
    )
    edits.biases[-52:] = float("-inf")
    for temperature in (0.0, 0.9):
        batch = replace(make_batch(4, temperature=temperature), edits=edits)
        before = logits.clone()
        check(logits, batch)
        assert torch.equal(logits, before)
        assert sample(logits, batch).finite.tolist() == [True, True, True, False]


@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_only_what_is_allowed_is_drawn(vocab_size: int) -> None:
    """Also where the bits end before the vocabulary does."""
    torch.manual_seed(6)
    logits = torch.randn(5, vocab_size).half()
    bits = torch.randint(-(2**31), 2**31, (3, vocab_size // 32), dtype=torch.int32)
    bits[2] = 0
    allowed = AllowedTokens(torch.tensor([1, -1, 0, 2, 1], dtype=torch.int32), bits)
    for temperature in (0.0, 0.9):
        batch = replace(make_batch(5, temperature=temperature), allowed=allowed)
        tokens = check(logits, batch)
        assert sample(logits, batch).finite.tolist() == [True, True, True, False, True]
        may = reference.may_be_drawn(allowed, vocab_size)
        assert all(may[row, token] for row, token in enumerate(tokens) if row != 3)


def test_logprobs_are_of_the_model_s_own_distribution() -> None:
    torch.manual_seed(5)
    logits = torch.randn(3, 200).half()
    logits[1, [150, 30, 70]] = 9.0
    batch = replace(make_batch(3, temperature=0.5), num_logprobs=5)
    got, want = sample(logits, batch), reference.sample(logits, batch)
    assert got.top_tokens is not None and want.top_tokens is not None
    assert got.top_tokens.tolist() == want.top_tokens.tolist()
    torch.testing.assert_close(got.top_logprobs, want.top_logprobs)
    torch.testing.assert_close(got.logprobs, want.logprobs)
