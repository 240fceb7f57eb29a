"""Beam search in the gateway: its rules on a small model by hand, and what a request may ask of it."""

from __future__ import annotations

from itertools import product
from typing import Any

import httpx
import pytest

from gateway.beam_stream import MOST_TOKENS, beam_options
from gateway.beams import BeamOptions, BeamSearch
from gateway.errors import ApiError
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from protos.engine_pb2 import LinkResponse, ModelInfo, Refusal, Submit, TokenLogprobs
from tests.gateway.fake_engine import FAILING_DIGEST, MODEL, next_token
from tests.gateway.local_stack import LocalStack, wait_until

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


def test_every_beam_of_every_step_is_paid_for(module_client: httpx.Client, module_stack: LocalStack) -> None:
    """One answer ends with its first token, the other goes on to the last."""
    engine, steps = module_stack.engines[0], 8
    stop = next_token(Submit(prompt_tokens=[65]), 0, []) + 1  # the second most likely after the prompt
    before = len(engine.submits)
    body = {
        "model": MODEL,
        "prompt": [65],
        "use_beam_search": True,
        "n": 2,
        "max_tokens": steps,
        "logprobs": 0,
        "length_penalty": 0.0,
        "stop_token_ids": [stop],
        "ignore_eos": True,
    }
    answer = module_client.post("/v1/completions", json=body).json()
    assert len(engine.submits) - before == 1 + (steps - 1) * 2
    lengths = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert sorted(lengths) == [0, steps], "without the end token"
    assert answer["usage"]["completion_tokens"] == 2 * steps

    def latest() -> tuple[int, str]:
        entry = module_client.get("/v1/usage/requests").json()["data"][0]
        return entry["output_tokens"], entry["outcome"]

    wait_until(lambda: latest() == (2 * steps, "completed"), "the ledger says the same")


def test_a_step_that_a_full_queue_refuses_is_sent_again(
    module_client: httpx.Client, module_stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = module_stack.engines[0]
    body = {"model": MODEL, "prompt": "again", "use_beam_search": True, "n": 2, "max_tokens": 4}
    want = module_client.post("/v1/completions", json=body).json()["choices"]
    admit, asked = engine._admit, 0

    def refuse_the_third_step(submit: Submit, choices: Any) -> LinkResponse:
        nonlocal asked
        asked += 1
        engine.refusing, engine.refusal = asked in (4, 5), Refusal.REFUSAL_TENANT_QUEUE_FULL
        return admit(submit, choices)

    monkeypatch.setattr(engine, "_admit", refuse_the_third_step)
    answer = module_client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == want and asked == 1 + 3 * 2 + 2


def submit_of(prompt: int, beams: int, max_tokens: int) -> Submit:
    return Submit(prompt_tokens=[1] * prompt, seeds=[0] * beams, max_tokens=max_tokens)


def test_what_each_step_sends_is_bounded() -> None:
    info = ModelInfo(eos_token_ids=[END])
    body = {"model": MODEL, "prompt": "x", "n": 4, "use_beam_search": True}
    fields = CompletionRequest.model_validate(body)
    fits = [submit_of(MOST_TOKENS // 8 - 10, 4, 10)] * 2
    assert [options.max_tokens for options in beam_options(fields, fits, info)] == [10, 10]
    with pytest.raises(ApiError, match=r"131,076 tokens in all, .* more than 131,072") as refused:
        beam_options(fields, [fits[0], submit_of(MOST_TOKENS // 8 - 9, 4, 10)], info)
    assert refused.value.status == 400 and refused.value.param == "n"


def test_a_search_of_no_stated_length_is_as_long_as_fits() -> None:
    fields = ChatRequest.model_validate({"model": MODEL, "n": 4, "use_beam_search": True, **CHAT})
    submit = submit_of(1000, 4, 100_000)
    (options,) = beam_options(fields, [submit], ModelInfo(eos_token_ids=[END]))
    assert options.max_tokens == submit.max_tokens == MOST_TOKENS // 4 - 1000
    with pytest.raises(ApiError, match="shorten the prompt"):
        beam_options(fields, [submit_of(MOST_TOKENS // 4, 4, 100)], ModelInfo())


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
