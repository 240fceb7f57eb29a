"""What text completions have and chats do not: the best of several, prompts that are shown and scored."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from gateway.api import completions
from gateway.best_of import best_choices
from protos import engine_pb2 as pb
from tests.gateway.fake_engine import EOS, MODEL, FakeEngine, make_tokenizer, next_token
from tests.gateway.local_stack import LocalStack

PROMPT = "Rain 🙂 w1?"


@pytest.fixture
def engine(module_stack: LocalStack) -> FakeEngine:
    return module_stack.engines[0]


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: httpx.Client, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices of a streamed answer, put together."""
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, **fields}
    found: dict[int, dict[str, Any]] = {}
    for line in client.post("/v1/completions", json=body).text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            into = found.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            into["text"] += choice["text"]
            into["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"]:
                into["logprobs"] = into["logprobs"] or {name: [] for name in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    into["logprobs"][name] += values
    return found


def tokens_of(submit: pb.Submit, choice: int) -> list[int]:
    """All that the fake engine draws for a choice, its end token included."""
    tokens: list[int] = []
    while len(tokens) < submit.max_tokens and EOS not in tokens:
        tokens.append(next_token(submit, submit.seeds[choice], tokens))
    return tokens


def mean_logprob(tokens: list[int]) -> float:
    return sum(-(token % 7) / 4 for token in tokens) / len(tokens)


# ---- best_of --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_n_most_likely_of_best_of_are_given_best_first(
    module_client: httpx.Client, engine: FakeEngine, logprobs: int | None
) -> None:
    prompts = ["one", "two"]
    answer = complete(
        module_client, prompt=prompts, n=2, best_of=6, seed=3, max_tokens=120, logprobs=logprobs
    )
    submits = engine.submits[-2:]
    expected, num_drawn = [], 0
    for submit in submits:
        drawn = [tokens_of(submit, choice) for choice in range(6)]
        num_drawn += sum(map(len, drawn))
        assert len({len(tokens) for tokens in drawn}) > 1, "means and sums would order them alike"
        expected += sorted(drawn, key=mean_logprob, reverse=True)[:2]
    decode = make_tokenizer().decode
    assert [choice["text"] for choice in answer["choices"]] == [decode(tokens) for tokens in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == num_drawn, "all that were generated are paid for"


def test_of_equally_likely_choices_the_earlier_are_better() -> None:
    assert best_choices("abcdef", [-1, -1, -2, -3, -1, -1], of=3, keep=2) == ["a", "b", "e", "f"]


def test_as_many_as_the_best_may_be_streamed(module_client: httpx.Client) -> None:
    whole = complete(module_client, n=2, best_of=2, seed=1, max_tokens=20)
    found = streamed(module_client, n=2, best_of=2, seed=1, max_tokens=20)
    assert [found[choice["index"]]["text"] for choice in whole["choices"]] == [
        choice["text"] for choice in whole["choices"]
    ]


# ---- echo -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2}, {"logprobs": 0, "n": 2, "stop": ["w", "🙂"]}], ids=str
)
def test_an_echoed_prompt_comes_before_what_is_generated(
    module_client: httpx.Client, fields: dict[str, Any]
) -> None:
    fields = {"seed": 5, "max_tokens": 30, **fields}
    plain = complete(module_client, **fields)["choices"]
    echoed = complete(module_client, echo=True, **fields)["choices"]
    pieces = streamed(module_client, echo=True, **fields)
    ids = make_tokenizer().encode(PROMPT).ids
    for before, choice in zip(plain, echoed, strict=True):
        assert choice["text"] == PROMPT + before["text"]
        assert choice["finish_reason"] == before["finish_reason"]
        assert pieces[choice["index"]] == {
            name: choice[name] for name in ("text", "logprobs", "finish_reason")
        }
        if not before["logprobs"]:
            assert choice["logprobs"] is None
            continue
        logprobs, own = choice["logprobs"], before["logprobs"]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(ids)] == [-(token % 7) / 4 for token in ids[1:]]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert logprobs[name][len(ids) :] == own[name]
        assert logprobs["text_offset"][len(ids) :] == [len(PROMPT) + at for at in own["text_offset"]]
        assert_offsets(choice["text"], logprobs, len(ids))


def assert_offsets(text: str, logprobs: dict[str, Any], count: int) -> None:
    """The first tokens' texts lie where it is said; parts of a character at its place."""
    for token, at in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[:count]:
        assert "\ufffd" in token or text[at:].startswith(token)


def test_a_prompt_is_scored_without_an_answer(module_client: httpx.Client, engine: FakeEngine) -> None:
    """As an evaluation harness asks for it."""
    ids = make_tokenizer().encode(PROMPT).ids
    answer = complete(module_client, prompt=[ids, [65]], echo=True, logprobs=1, max_tokens=0)
    first, second = answer["choices"]
    assert (first["text"], first["finish_reason"]) == (PROMPT, "length")
    assert len(first["logprobs"]["tokens"]) == len(ids) and second["logprobs"]["token_logprobs"] == [None]
    assert answer["usage"]["prompt_tokens"] == len(ids) + 1
    assert answer["usage"]["completion_tokens"] == 0
    assert all(submit.prompt_only and submit.max_tokens == 0 for submit in engine.submits[-2:])
    top = first["logprobs"]["top_logprobs"][1:]
    for text, alternatives in zip(first["logprobs"]["tokens"][1:], top, strict=True):
        assert text in alternatives, "the token itself is always among them"


def test_of_echoed_token_ids_special_ones_are_shown_too(module_client: httpx.Client) -> None:
    answer = complete(module_client, prompt=[72, EOS, 73], echo=True, max_tokens=0)
    tokenizer = make_tokenizer()
    assert answer["choices"][0]["text"] == tokenizer.decode([72, EOS, 73], skip_special_tokens=False)


def test_long_echoes_are_the_same_streamed(module_client: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": [65] * 200, "n": 8, "echo": True, "logprobs": 1, "max_tokens": 1}
    whole = complete(module_client, seed=1, **fields)["choices"]
    found = streamed(module_client, seed=1, **fields)
    for choice in whole:
        assert len(choice["logprobs"]["tokens"]) >= 200
        assert found[choice["index"]]["text"] == choice["text"]
        assert found[choice["index"]]["logprobs"] == choice["logprobs"]


def test_echo_goes_with_best_of(module_client: httpx.Client) -> None:
    fields = {"n": 1, "best_of": 4, "seed": 8, "max_tokens": 40}
    plain = complete(module_client, **fields)["choices"][0]["text"]
    assert complete(module_client, echo=True, **fields)["choices"][0]["text"] == PROMPT + plain


# ---- stop strings that stay -----------------------------------------------------------------------------


def test_a_text_may_end_with_its_stop_string(module_client: httpx.Client) -> None:
    fields = {"seed": 9, "max_tokens": 60, "ignore_eos": True}
    text = complete(module_client, **fields)["choices"][0]["text"]
    stop = text[20:24]
    (kept,) = complete(module_client, stop=stop, include_stop_str_in_output=True, **fields)["choices"]
    (cut,) = complete(module_client, stop=stop, **fields)["choices"]
    assert kept["text"] == cut["text"] + stop == text[: text.index(stop) + 4]
    assert kept["finish_reason"] == "stop"
    pieces = streamed(module_client, stop=stop, include_stop_str_in_output=True, **fields)
    assert pieces[0]["text"] == kept["text"]


def test_the_token_that_ends_a_text_may_stay_too(module_client: httpx.Client, engine: FakeEngine) -> None:
    whole = complete(module_client, seed=4, max_tokens=30, ignore_eos=True)["choices"][0]["text"]
    tokens = tokens_of(engine.submits[-1], 0)
    stop = next(token for token in tokens[5:] if token >= 258)
    (kept,) = complete(
        module_client,
        seed=4,
        max_tokens=30,
        ignore_eos=True,
        stop_token_ids=[stop],
        include_stop_str_in_output=True,
    )["choices"]
    assert kept["text"] == make_tokenizer().decode(tokens[: tokens.index(stop) + 1])
    assert whole.startswith(kept["text"]) and kept["finish_reason"] == "stop"


# ---- what does not go together --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "at least 'n'"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of", "excludes 'stream'"),
        ({"prompt": ["a", "b"], "best_of": 100}, "best_of", "at most 128"),
        ({"max_tokens": 0}, "max_tokens", "only with 'echo'"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "at most 0"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "greater than or equal to 0"),
        ({"echo": "yes"}, "echo", "boolean"),
        ({"prompt": [65] * 400, "echo": True, "logprobs": 20, "n": 128}, "logprobs", "logprobs of prompts"),
        ({"prompt": [EOS - 1] * 200, "echo": True, "n": 128}, "echo", "more than 200,000"),
    ],
)
def test_what_does_not_go_together_is_refused(
    module_client: httpx.Client,
    fields: dict[str, Any],
    param: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(completions, "MAX_ECHOED_TEXT", 200_000)  # prompts are short here
    answer = module_client.post("/v1/completions", json={"model": MODEL, "prompt": "x", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and says in error["message"]
