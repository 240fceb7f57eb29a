"""Beam search by its rules, on a small model by hand."""

from __future__ import annotations

from itertools import product

import pytest

from engine.beams import BeamOptions, BeamSearch, EarlyStopping, num_common_tokens
from engine.step import TokenLogprobs

END, LENGTH = 0, 4
ENDS = frozenset({END})


def logprob(tokens: tuple[int, ...], token: int) -> float:
    """A model of four tokens, of which the first ends: likely ones depend on the one before."""
    last = tokens[-1] if tokens else 3
    return -((token * 7 + last * 5 + len(tokens) * 3) % 11) / 4 - 0.01 * token


def top(tokens: tuple[int, ...]) -> TokenLogprobs:
    order = sorted(range(4), key=lambda token: -logprob(tokens, token))
    return TokenLogprobs(0.0, tuple(order), tuple(logprob(tokens, token) for token in order))


def advance(search: BeamSearch) -> None:
    search.advance({beam: top(tuple(beam.tokens)) for beam in search.beams})


def score(tokens: tuple[int, ...], penalty: float) -> float:
    total = sum(logprob(tokens[:i], token) for i, token in enumerate(tokens))
    return total / len(tokens) ** penalty


def every_answer() -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [
        (*inner, END) for length in range(LENGTH) for inner in product((1, 2, 3), repeat=length)
    ]
    return [*found, *product((1, 2, 3), repeat=LENGTH)]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_with_beams_for_everything_the_best_of_all_answers_are_found(penalty: float) -> None:
    """Then nothing is pruned, and the search must find what trying them all does."""
    width = 200
    search = BeamSearch(BeamOptions(width, LENGTH, ENDS, penalty, EarlyStopping.NEVER, num_top=2))
    while search.beams:
        advance(search)
    found = [tuple(beam.tokens) for beam in search.answers]
    best = sorted(every_answer(), key=lambda tokens: -score(tokens, penalty))
    assert len(found) == len(best)
    assert [score(tokens, penalty) for tokens in found] == pytest.approx(
        [score(tokens, penalty) for tokens in best]
    )
    told = [beam.logprobs for beam in search.answers[0].path]
    for i, (token, entry) in enumerate(zip(found[0], told, strict=True)):
        assert entry is not None and entry.chosen == pytest.approx(logprob(found[0][:i], token))
        assert entry.top_tokens == top(found[0][:i]).top_tokens[:2], "as many as were asked for"


@pytest.mark.parametrize("early", list(EarlyStopping))
def test_no_more_beams_than_asked_for_and_as_many_answers(early: EarlyStopping) -> None:
    search = BeamSearch(BeamOptions(2, LENGTH, ENDS, 1.0, early))
    num_steps = 0
    while search.beams:
        assert len(search.beams) == (2 if num_steps else 1)
        advance(search)
        num_steps += 1
    assert len(search.answers) == 2
    assert all(beam.logprobs is None for answer in search.answers for beam in answer.path)


@pytest.mark.parametrize(
    ("end", "early", "num_steps"),
    [
        (-0.5, EarlyStopping.ON, 2),
        (-0.5, EarlyStopping.OFF, 20),  # the answers of each step are better than those before
        (-0.3, EarlyStopping.OFF, 2),
        (-0.3, EarlyStopping.NEVER, 18),  # 0.4 times 18 by 20 is more than 0.7 by 2, the second best
    ],
)
def test_when_a_search_ends(end: float, early: EarlyStopping, num_steps: int) -> None:
    """Every beam has the end token, one that is about as likely, and others that are not."""
    likely = sorted([(end, END), (-0.4, 1), (-5.0, 2), (-6.0, 3)], reverse=True)
    same = TokenLogprobs(0.0, tuple(token for _, token in likely), tuple(value for value, _ in likely))
    search = BeamSearch(BeamOptions(2, 20, ENDS, 1.0, early))
    for step in range(1, num_steps + 1):
        search.advance(dict.fromkeys(search.beams, same))
        assert bool(search.beams) == (step < num_steps)


def test_what_beams_begin_with_is_one_chain() -> None:
    search = BeamSearch(BeamOptions(3, 10))
    assert num_common_tokens(search.beams) == 0
    advance(search)
    assert num_common_tokens(search.beams) == 0, "three tokens after the prompt"
    (first, *_), (chosen,) = search.beams, {search.beams[0].token}
    search.advance(
        {
            beam: TokenLogprobs(0.0, tuple(range(6)), ((0.0 if beam is first else -100.0),) * 6)
            for beam in search.beams
        }
    )
    assert num_common_tokens(search.beams) == 1
    assert [beam.tokens[0] for beam in search.beams] == [chosen] * 3
    assert num_common_tokens(search.beams[:1]) == 2
