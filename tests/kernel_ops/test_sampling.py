from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.sampling import AllowedTokens, Sampled, SamplingBatch, TokenEdits, sample

pytestmark = pytest.mark.usefixtures("poisoned_memory")

VOCAB = 1003
"""Not a multiple of any vector length."""
PINNED = [
    [2399192974, 1527520360, 3378212876],
    [1404220659, 3147711717, 835066920],
    [1353990769, 331807731, 3646254040],
    [1212649767, 3188892475, 518048840],
]


def batch_of(rows: int, **changes: Any) -> SamplingBatch:
    """Every row with the same parameters; a change is a value for all rows, or a list of one for each."""
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seeds": 0,
        "positions": 0,
    }
    values |= {"positions": list(range(rows))}
    types = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int64}
    options = {
        name: changes.pop(name)
        for name in ("edits", "allowed", "num_logprobs", "all_greedy")
        if name in changes
    }
    tensors = {
        name: torch.tensor(
            value if isinstance(value, list) else [value] * rows, dtype=types.get(name, torch.float32)
        )
        for name, value in (values | changes).items()
    }
    return SamplingBatch(**tensors, **options)


def edits_of(rows: int, entries: list[tuple[int, int, float, int, bool]], **penalties: float) -> TokenEdits:
    """Entries are (row, token, bias, count, seen)."""
    row, token, bias, count, seen = zip(*entries, strict=True)
    return TokenEdits(
        torch.tensor(row, dtype=torch.int32),
        torch.tensor(token, dtype=torch.int32),
        torch.tensor(bias, dtype=torch.float32),
        torch.tensor(count, dtype=torch.int32),
        torch.tensor(seen),
        torch.full((rows,), penalties.get("presence", 0.0)),
        torch.full((rows,), penalties.get("frequency", 0.0)),
        torch.full((rows,), penalties.get("repetition", 1.0)),
    )


def allowed_of(lists: list[int], tokens: list[list[int]], words: int = -(-VOCAB // 32)) -> AllowedTokens:
    """`lists` says by row which of `tokens` it may draw; -1: any."""
    bits = torch.zeros(len(tokens), words * 32, dtype=torch.int64)
    for index, own in enumerate(tokens):
        bits[index, own] = 1
    packed = (bits.view(len(tokens), words, 32) << torch.arange(32)).sum(dim=2)
    return AllowedTokens(torch.tensor(lists, dtype=torch.int32), packed.to(torch.int32))


def random_logits(rows: int, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)


def assert_same(got: Sampled, expected: Sampled) -> None:
    assert torch.equal(got.finite, expected.finite)
    assert torch.equal(got.tokens, expected.tokens)
    if expected.logprobs is None:
        assert got.logprobs is None and got.top_tokens is None and got.top_logprobs is None
        return
    live = expected.finite
    assert got.logprobs is not None and got.top_tokens is not None and got.top_logprobs is not None
    assert expected.top_tokens is not None and expected.top_logprobs is not None
    torch.testing.assert_close(got.logprobs[live], expected.logprobs[live], atol=1e-4, rtol=1e-5)
    assert torch.equal(got.top_tokens[live], expected.top_tokens[live])
    torch.testing.assert_close(got.top_logprobs[live], expected.top_logprobs[live], atol=1e-4, rtol=1e-5)


def test_greedy_takes_the_highest_and_of_equals_the_first(dtype: torch.dtype) -> None:
    logits = random_logits(4, dtype)
    logits[0, [700, 20, 1002]] = 30.0
    logits[1, 1002] = 30.0
    logits[2, 0] = 30.0
    tokens = sample(logits, batch_of(4, temperature=0.0, all_greedy=True)).tokens
    assert tokens.tolist() == [20, 1002, 0, int(logits[3].argmax())]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5, "top_k": 5},
        {"top_k": 1},
        {"top_k": 100, "top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 0.01, "top_k": 40, "top_p": 0.8},
        {"top_k": 5000, "top_p": 0.99999},
    ],
    ids=str,
)
def test_draws_are_the_reference_s(parameters: dict[str, Any], dtype: torch.dtype) -> None:
    logits = random_logits(200, dtype)
    batch = batch_of(200, seeds=[(i * 0x9E3779B97F4A7C15) % 2**63 - 2**62 for i in range(200)], **parameters)
    assert_same(sample(logits, batch), reference.sample(logits.double(), batch))


def test_rows_of_all_kinds_do_not_mix(dtype: torch.dtype) -> None:
    logits = random_logits(6, dtype)
    parameters = {
        "temperature": [0.0, 1.0, 0.5, 1.0, 2.0, 1.0],
        "top_k": [0, 0, 10, 0, 3, 0],
        "top_p": [1.0, 1.0, 0.9, 0.3, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.2],
        "seeds": [1, 2, 3, 4, 5, 6],
    }
    edits = edits_of(6, [(1, 5, 4.0, 0, False), (4, 9, -math.inf, 2, True)], repetition=1.3)
    together = sample(logits, batch_of(6, edits=edits, num_logprobs=3, **parameters))
    assert_same(
        together, reference.sample(logits.double(), batch_of(6, edits=edits, num_logprobs=3, **parameters))
    )
    for row in range(6):
        own = [entry for entry in ((1, 5, 4.0, 0, False), (4, 9, -math.inf, 2, True)) if entry[0] == row]
        single = {name: [values[row]] for name, values in parameters.items()} | {"positions": [row]}
        edits = edits_of(1, [(0, *entry[1:]) for entry in own], repetition=1.3) if own else None
        alone = sample(logits[row : row + 1].clone(), batch_of(1, edits=edits, num_logprobs=3, **single))
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs is not None and alone.logprobs is not None
        assert together.logprobs[row] == alone.logprobs[0]


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", [0, 500, VOCAB - 1])
def test_a_row_that_is_not_finite_is_told_and_spoils_no_other(
    poison: float, temperature: float, where: int, dtype: torch.dtype
) -> None:
    logits = random_logits(3, dtype)
    clean = sample(logits, batch_of(3, temperature=temperature, num_logprobs=2))
    logits[1, where] = poison
    edits = edits_of(3, [(1, where, -math.inf, 1, True)])
    spoilt = sample(logits, batch_of(3, temperature=temperature, num_logprobs=2, edits=edits))
    assert spoilt.finite.tolist() == [True, False, True], "also where the poison is banned"
    assert spoilt.tokens[1] == 0
    others = torch.tensor([0, 2])
    assert torch.equal(spoilt.tokens[others], clean.tokens[others])
    assert spoilt.logprobs is not None and clean.logprobs is not None
    assert torch.equal(spoilt.logprobs[others], clean.logprobs[others])


def test_nothing_to_draw_is_not_finite(dtype: torch.dtype) -> None:
    logits = torch.full((3, 4), -math.inf, dtype=dtype)
    logits[1:, :2] = 0.0
    edits = edits_of(3, [(2, 0, -math.inf, 0, False), (2, 1, -math.inf, 0, False)])
    assert sample(logits, batch_of(3, edits=edits)).finite.tolist() == [False, True, False]


def test_minus_infinity_from_the_model_is_a_token_that_is_never_drawn(dtype: torch.dtype) -> None:
    logits = torch.zeros(500, 40, dtype=dtype)
    logits[:, 5:] = -math.inf
    sampled = sample(logits, batch_of(500))
    assert sampled.finite.all() and set(sampled.tokens.tolist()) == set(range(5))


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 2.0, 2.0, 9.0]])
    entries = [
        (0, 0, 0, 0, True),
        (0, 1, 0, 0, True),
        (0, 2, 0, 3, True),
        (0, 3, 1.0, 0, False),
        (0, 5, -math.inf, 0, False),
    ]
    edits = edits_of(1, entries, presence=0.5, frequency=0.25, repetition=2.0)
    expected = [1.0, -4.0, 1.0 - 0.5 - 0.75, 3.0, 2.0, -math.inf]
    assert reference.edit_logits(logits, edits)[0].tolist() == expected


def test_edits_are_the_reference_s(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(3)
    entries = []
    for row in range(0, 50, 2):
        for token in torch.randperm(VOCAB, generator=rng)[:300].tolist():
            count = int(torch.randint(0, 4, (), generator=rng))
            bias = -math.inf if token % 3 == 0 else float(torch.randn((), generator=rng))
            entries.append((row, token, bias, count, count > 0 or token % 2 == 0))
    entries.append((-1, 0, math.nan, 1, True))
    edits = edits_of(50, entries, presence=0.4, frequency=0.3, repetition=1.2)
    logits = random_logits(50, dtype)
    for temperature in (0.0, 0.8):
        batch = batch_of(50, edits=edits, temperature=temperature, num_logprobs=4)
        assert_same(sample(logits, batch), reference.sample(logits.double(), batch))


def test_only_what_is_allowed_is_drawn(dtype: torch.dtype) -> None:
    logits = random_logits(40, dtype)
    lists = [-1, 0, 1, 2] * 10
    tokens = [[31, 32, 63, 64, 500, VOCAB - 1], [7], list(range(0, VOCAB, 3))]
    allowed = allowed_of(lists, tokens)
    edits = edits_of(40, [(1, 64, 50.0, 0, False), (2, 9, 50.0, 0, False)])
    for temperature in (0.0, 1.3):
        batch = batch_of(40, allowed=allowed, edits=edits, temperature=temperature, num_logprobs=3)
        sampled = sample(logits, batch)
        assert_same(sampled, reference.sample(logits.double(), batch))
        assert sampled.tokens[1] == 64, "a bias is applied before"
        for row, token in enumerate(sampled.tokens.tolist()):
            assert lists[row] < 0 or token in tokens[lists[row]]


def test_a_list_of_what_is_allowed_may_be_shorter_than_the_vocabulary_and_empty(dtype: torch.dtype) -> None:
    logits = random_logits(3, dtype)
    batch = batch_of(3, allowed=allowed_of([0, 1, -1], [[3, 40], []], words=2), temperature=1.0)
    sampled = sample(logits, batch)
    assert sampled.tokens[0] in (3, 40)
    assert sampled.finite.tolist() == [True, False, True]
    assert_same(sampled, reference.sample(logits.double(), batch))


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_the_model_s_own(count: int, dtype: torch.dtype) -> None:
    logits = random_logits(8, dtype)
    logits[0, 100:110] = 12.0
    edits = edits_of(8, [(0, 100, -50.0, 0, False)])
    sampled = sample(logits, batch_of(8, temperature=0.5, top_k=3, edits=edits, num_logprobs=count))
    expected = logits.double().log_softmax(dim=1)
    top = expected.sort(dim=1, descending=True, stable=True)
    assert (
        sampled.logprobs is not None and sampled.top_tokens is not None and sampled.top_logprobs is not None
    )
    chosen = expected.gather(1, sampled.tokens[:, None])[:, 0]
    torch.testing.assert_close(sampled.logprobs.double(), chosen, atol=1e-4, rtol=1e-5)
    assert torch.equal(sampled.top_tokens, top.indices[:, :count])
    torch.testing.assert_close(sampled.top_logprobs.double(), top.values[:, :count], atol=1e-4, rtol=1e-5)


def _kept(probabilities: list[float], parameters: dict[str, Any]) -> list[float]:
    """The distribution after the filters, by their definitions and without ties."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept = [i for i in order if probabilities[i] >= parameters.get("min_p", 0.0) * probabilities[order[0]]]
    kept = kept[: parameters.get("top_k") or None]
    total, mass, nucleus = sum(probabilities[i] for i in kept), 0.0, []
    for i in kept:
        if mass / total < parameters.get("top_p", 1.0):
            nucleus.append(i)
        mass += probabilities[i]
    total = sum(probabilities[i] for i in nucleus)
    return [probabilities[i] / total if i in nucleus else 0.0 for i in range(len(probabilities))]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"top_k": 9, "top_p": 0.6},
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["positions", "seeds"])
def test_draws_are_distributed_as_the_softmax(parameters: dict[str, Any], vary: str) -> None:
    """Chi-square, at a significance of about 1e-4 with fixed seeds."""
    draws = 40_000
    row = torch.tensor([0.0, 1.3, -0.7, 2.1, 0.4, 1.0, -2.0, 1.7, 0.9, -0.3, 0.1, 1.5])
    probabilities = (row.double() / parameters.get("temperature", 1.0)).softmax(0).tolist()
    expected = torch.tensor(_kept(probabilities, parameters)) * draws
    varied: dict[str, Any] = {"positions": 7, "seeds": 11} | {vary: list(range(draws))}
    tokens = sample(row.repeat(draws, 1), batch_of(draws, **parameters, **varied)).tokens
    counts = tokens.bincount(minlength=len(row)).double()
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    statistic = ((counts - expected)[live] ** 2 / expected[live]).sum()
    freedom = int(live.sum()) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def test_rare_tokens_are_as_rare_as_they_should_be() -> None:
    """One likely token among 50,000 that share a thousandth of the mass: the noise's tail decides."""
    vocab, draws = 50_001, 2000
    row = torch.zeros(vocab)
    row[0] = math.log(50_000 * 9)
    tokens = torch.cat(
        [sample(row.repeat(100, 1), batch_of(100, seeds=seed)).tokens for seed in range(draws // 100)]
    )
    rare = tokens[tokens > 0]
    assert abs(len(rare) / draws - 0.1) < 0.03
    assert abs(rare.double().mean() / vocab - 0.5) < 0.1
    assert rare.unique().numel() > 0.95 * len(rare)


def test_the_same_seed_and_position_draw_the_same_token_anywhere(threads: Callable[[int], None]) -> None:
    logits = random_logits(1).repeat(9, 1)
    seeds, positions = [5, 5, 6, 5, -5, 5 + 2**32, 5, 5, 5], [3, 3, 3, 4, 3, 3, 3, 3, 3]
    threads(1)
    alone = sample(logits, batch_of(9, seeds=seeds, positions=positions)).tokens
    threads(2)
    assert torch.equal(sample(logits, batch_of(9, seeds=seeds, positions=positions)).tokens, alone)
    same = alone[[0, 1, 6, 7, 8]]
    assert (same == same[0]).all()
    assert len(set(alone[[0, 2, 3, 4, 5]].tolist())) >= 4, (
        "another seed, position or high half is another draw"
    )


def test_noise_bits_are_pinned() -> None:
    """Other engines continue a request by these very values: they are part of the contract."""
    seeds = torch.tensor([0, 1, -1, 2**40 + 3])
    bits = reference.noise_bits(seeds, torch.tensor([0, 1, 2, 2**33 + 5]), 3)
    assert bits.tolist() == PINNED
    assert torch.equal(bits, reference.noise_bits(seeds, torch.tensor([0, 1, 2, 5]), 3))


def test_noise_of_neighbouring_seeds_and_positions_is_uncorrelated() -> None:
    noise = reference.gumbel_noise(torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1]), 20_000).double()
    correlation = torch.corrcoef(noise) - torch.eye(4)
    assert correlation.abs().max() < 0.03
    assert abs(noise.mean() - 0.5772) < 0.02 and abs(noise.std() - 1.2825) < 0.02
