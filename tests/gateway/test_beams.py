"""Beam search in the gateway: its rules on a small model by hand, and what a request may ask of it."""

from __future__ import annotations

from itertools import product
from typing import Any

import httpx
import pytest

from gateway.beams import BeamOptions, BeamSearch
from protos.engine_pb2 import TokenLogprobs
from tests.gateway.fake_engine import FAILING_DIGEST, MODEL
from tests.gateway.local_stack import LocalStack

END, LENGTH = 0, 4
CHAT: Any = {"messages": [{"role": "user", "content": "Hello"}]}


def logprob(tokens: tuple[int, ...], token: int) -> float:
    """A model of four tokens, of which the first ends: likely ones depend on the one before."""
    last = tokens[-1] if tokens else 3
    return -((token * 7 + last * 5 + len(tokens) * 3) % 11) / 4 - 0.01 * token


def top(tokens: tuple[int, ...]) -> TokenLogprobs:
    order = sorted(range(4), key=lambda token: -logprob(tokens, token))
    return TokenLogprobs(top_tokens=order, top_logprobs=[logprob(tokens, token) for token in order])


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
    search = BeamSearch(BeamOptions(width, LENGTH, {END}, penalty, "never"))
    while search.beams:
        search.advance([top(beam.tokens) for beam in search.beams])
    found = [beam.tokens for beam in search.answers]
    best = sorted(every_answer(), key=lambda tokens: -score(tokens, penalty))
    assert len(found) == len(best)
    assert [score(tokens, penalty) for tokens in found] == pytest.approx(
        [score(tokens, penalty) for tokens in best]
    )
    (first, *_), answer = best, search.answers[0]
    assert [entry.chosen for entry in answer.logprobs] == pytest.approx(
        [logprob(first[:i], token) for i, token in enumerate(answer.tokens)]
    )


@pytest.mark.parametrize("early", [True, False, "never"])
def test_no_more_beams_than_asked_for_and_as_many_answers(early: Any) -> None:
    search = BeamSearch(BeamOptions(2, LENGTH, {END}, 1.0, early))
    while search.beams:
        assert len(search.beams) <= 2
        search.advance([top(beam.tokens) for beam in search.beams])
    assert len(search.answers) == 2


def test_through_the_api(module_client: httpx.Client, module_stack: LocalStack) -> None:
    engine = module_stack.engines[0]
    before = len(engine.submits)
    body = {"model": MODEL, "prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 5, "logprobs": 1}
    answer = module_client.post("/v1/completions", json=body).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    first, second = (sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"])
    assert first >= second
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 10,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    submits = engine.submits[before:]
    assert len(submits) == 1 + 4 * 2, "one for the prompt, and two for each step after"
    assert all(submit.max_tokens == 1 and submit.sampling.logprobs == 4 for submit in submits)
    chat = module_client.post(
        "/v1/chat/completions",
        json={"model": MODEL, **CHAT, "use_beam_search": True, "n": 2, "max_tokens": 4},
    )
    assert len(chat.json()["choices"]) == 2


def test_a_search_that_fails_is_an_error(module_client: httpx.Client, module_stack: LocalStack) -> None:
    module_stack.add_adapter("shared", "failing", FAILING_DIGEST)
    body = {"model": "failing", "prompt": "x", "use_beam_search": True, "n": 2}
    answer = module_client.post("/v1/completions", json=body)
    assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"stream": True}, "stream"),
        ("completions", {"temperature": 0.5}, "temperature"),
        ("completions", {"top_p": 0.5}, "top_p"),
        ("completions", {"stop": "x"}, "stop"),
        ("completions", {"logit_bias": {"1": 2}}, "logit_bias"),
        ("completions", {"guided_regex": "a"}, "guided_regex"),
        ("completions", {"max_tokens": 0, "echo": True}, "max_tokens"),
        ("completions", {"n": 11}, "n"),
        ("completions", {"best_of": 8, "stop_token_ids": [5]}, "best_of"),
        ("completions", {"use_beam_search": False, "length_penalty": 1}, "length_penalty"),
        ("completions", {"use_beam_search": None, "early_stopping": True}, "early_stopping"),
        ("completions", {"early_stopping": "sometimes"}, "early_stopping"),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_a_search_cannot_do_is_refused(
    module_client: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    prompt = CHAT if path.startswith("chat") else {"prompt": "x"}
    body = {"model": MODEL, "use_beam_search": True, **prompt, **fields}
    answer = module_client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)
