"""Beam search through the gateway: what a request may ask of it, what it costs, and what becomes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest

from gateway.beam_stream import BeamStream, ask_for_beams
from gateway.engine_stream import EngineStream
from gateway.errors import ApiError
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from protos import engine_pb2 as pb
from tests.gateway.fake_engine import EOS, FAILING_DIGEST, MODEL, next_token
from tests.gateway.local_stack import LocalStack, wait_until

CHAT: Any = {"messages": [{"role": "user", "content": "Hello"}]}
SEARCH: Any = {"model": MODEL, "prompt": "x", "use_beam_search": True, "n": 2}


def booked(client: httpx.Client) -> list[tuple[int, str]]:
    """What the ledger has, the latest first: tokens of output, and the outcome."""
    entries = client.get("/v1/usage/requests").json()["data"]
    return [(entry["output_tokens"], entry["outcome"]) for entry in entries]


def test_through_the_api(module_client: httpx.Client, module_stack: LocalStack) -> None:
    engine = module_stack.engines[0]
    before = len(engine.submits)
    body = {**SEARCH, "max_tokens": 5, "logprobs": 1, "length_penalty": 0.5, "early_stopping": "never"}
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
    (submit,) = engine.submits[before:]
    assert submit.beams == pb.Beams(length_penalty=0.5, early_stopping=pb.EARLY_STOPPING_NEVER)
    assert (len(submit.seeds), submit.max_tokens, submit.sampling.logprobs) == (2, 5, 1)
    chat = module_client.post(
        "/v1/chat/completions",
        json={"model": MODEL, **CHAT, "use_beam_search": True, "n": 2, "max_tokens": 4},
    )
    assert len(chat.json()["choices"]) == 2
    assert not engine.submits[-1].sampling.HasField("logprobs"), "nobody asked for any"


def test_every_beam_of_every_step_is_paid_for(module_client: httpx.Client) -> None:
    """One answer ends with its first token, the other goes on to the last."""
    steps = 8
    stop = next_token(pb.Submit(prompt_tokens=[65]), 0, []) + 1  # the second most likely after the prompt
    more = {"max_tokens": steps, "logprobs": 0, "length_penalty": 0.0, "stop_token_ids": [stop]}
    body = {**SEARCH, **more, "prompt": [65], "ignore_eos": True}
    answer = module_client.post("/v1/completions", json=body).json()
    lengths = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert sorted(lengths) == [0, steps], "without the end token"
    assert answer["usage"]["completion_tokens"] == 2 * steps
    said = [(2 * steps, "completed")]
    wait_until(lambda: booked(module_client)[:1] == said, "the ledger says the same")


def test_several_prompts_and_the_best_of_more_beams(module_client: httpx.Client) -> None:
    body = {**SEARCH, "prompt": ["x", "yy"], "n": 1, "best_of": 3, "max_tokens": 4, "ignore_eos": True}
    answer = module_client.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 2 * 3 * 4
    alone = [
        module_client.post("/v1/completions", json={**body, "prompt": prompt}).json()["choices"][0]["text"]
        for prompt in body["prompt"]
    ]
    assert [choice["text"] for choice in answer["choices"]] == alone


def test_a_client_that_leaves_pays_for_the_steps_so_far(
    module_client: httpx.Client, module_stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = module_stack.engines[0]
    monkeypatch.setattr(engine, "step_s", 0.02)
    given = engine.counts.setdefault("shared:3", [0, 0])
    before, aborts = given[1], len(engine.aborts)

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=module_stack.url, headers=module_client.headers) as client:
            body = {**SEARCH, "prompt": "bye", "max_tokens": 200, "ignore_eos": True}
            await client.post("/v1/completions", json=body, timeout=30)

    async def leave() -> None:
        task = asyncio.create_task(ask())
        await asyncio.to_thread(wait_until, lambda: given[1] >= before + 20, "the search goes on")
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    wait_until(lambda: len(engine.aborts) == aborts + 1 and not engine.running, "the engine has stopped")
    wait_until(lambda: booked(module_client)[0][1] == "disconnected", "it is booked")
    (tokens, _), *_ = booked(module_client)
    spent = given[1] - before
    assert tokens % 2 == 0 and spent - 4 <= tokens <= spent


def test_a_search_whose_engine_is_lost_begins_anew_and_is_booked_once(
    module_client: httpx.Client, module_stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, steps = module_stack.engines[0], 30
    body = {**SEARCH, "prompt": "lost", "max_tokens": steps, "ignore_eos": True}
    want = module_client.post("/v1/completions", json=body).json()["choices"]
    advance, asked = engine._search, 0

    def break_off(*args: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 20:
            raise ConnectionAbortedError("the link breaks")
        advance(*args)

    monkeypatch.setattr(engine, "_search", break_off)
    answer = module_client.post("/v1/completions", json=body).json()
    assert answer["choices"] == want
    assert asked == 20 + steps, "the second time from the beginning"
    assert answer["usage"]["completion_tokens"] == 2 * steps
    said = [(2 * steps, "completed")] * 2
    wait_until(lambda: booked(module_client)[:2] == said, "the ledger says the same of both")


class OneLink:
    """Places everything on itself, and hands out what a test says."""

    engine_id = "e"

    def __init__(self) -> None:
        self.submits: list[pb.Submit] = []
        self.aborted: list[int] = []

    def choose(self, submit: pb.Submit, model_digest: bytes, excluded: set[str]) -> Any:
        return self

    async def changed(self, timeout_s: float) -> None:
        raise AssertionError("there is a link")

    def submit(self, message: pb.LinkRequest, receiver: EngineStream, choices: Sequence[int]) -> int:
        self.submits.append(message.submit)
        return len(self.submits)

    def abort(self, request_id: int, wire_choice: int | None = None) -> None:
        self.aborted.append(request_id)


def stream_of(link: OneLink) -> BeamStream:
    submits = [pb.Submit(prompt_tokens=[1], seeds=[0, 1], beams=pb.Beams()) for _ in range(2)]
    deadline = time.monotonic() + 60
    return BeamStream(submits, model_digest=b"", placer=link, resume_timeout_s=1.0, deadline=deadline)


def finish(stream: BeamStream, choice: int, tokens: list[int]) -> None:
    stream.on_tokens(choice, tokens, [])
    stream.on_finished(choice, pb.Finished(choice=choice % 2, reason=pb.FINISH_REASON_LENGTH))


async def test_half_of_a_lost_searchs_answers_are_forgotten() -> None:
    """Its link breaks between the messages that tell its choices. The other prompt's search has ended."""
    link = OneLink()
    stream = stream_of(link)
    result = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert [list(submit.seeds) for submit in link.submits] == [[0, 1], [0, 1]]
    for choice in (0, 2):
        stream.on_searched(choice, 6)
    for choice in (0, 1, 2):
        finish(stream, choice, [7, 8, 9])
    stream.on_lost([3])
    await asyncio.sleep(0)
    assert not result.done() and stream.unread == 12
    assert [list(submit.seeds) for submit in link.submits[2:]] == [[0, 1]], "both of its choices"
    assert not link.submits[2].output_tokens
    stream.on_searched(2, 4)
    assert stream.unread == 12, "booked already"
    stream.on_searched(2, 6)
    assert stream.unread == 16
    finish(stream, 3, [5])
    finish(stream, 2, [4])
    deltas = {delta.choice: delta for delta in await result}
    assert {choice: delta.tokens for choice, delta in deltas.items()} == {
        **{0: [7, 8, 9], 1: [7, 8, 9]},
        **{2: [4], 3: [5]},
    }
    assert sum(delta.dropped for delta in deltas.values()) == 16 - 8
    assert stream.unread == 0 and await stream.next() == []


async def test_one_search_that_fails_is_told_at_once() -> None:
    stream = stream_of(OneLink())
    result = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.on_searched(0, 2)
    finish(stream, 0, [7])
    failed = pb.Finished(choice=1, reason=pb.FINISH_REASON_ERROR, error="not finite")
    stream.on_finished(3, failed)
    (delta,) = await asyncio.wait_for(result, 5)
    assert delta.error == "not finite" and stream.unread == 2
    stream.close()
    assert await stream.next() == []


def test_a_search_that_fails_is_an_error(module_client: httpx.Client, module_stack: LocalStack) -> None:
    module_stack.add_adapter("shared", "failing", FAILING_DIGEST)
    answer = module_client.post("/v1/completions", json={**SEARCH, "model": "failing"})
    assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"]


def test_a_full_queue_refuses_a_search(
    module_client: httpx.Client, module_stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_stack.engines[0], "refusing", True)
    monkeypatch.setattr(module_stack.engines[0], "refusal", pb.REFUSAL_TENANT_QUEUE_FULL)
    assert module_client.post("/v1/completions", json=SEARCH).status_code == 429


# ---- what may be asked for --------------------------------------------------------------------------------

INFO = pb.ModelInfo(eos_token_ids=[EOS], num_blocks=100, block_size=16)


def submit_of(prompt: int, beams: int, max_tokens: int) -> pb.Submit:
    return pb.Submit(prompt_tokens=[1] * prompt, seeds=[0] * beams, max_tokens=max_tokens)


def test_what_beams_may_need_is_in_the_pool() -> None:
    """60 blocks of the prompt are shared, and each of four beams may have ten of its own: 160 tokens."""
    fields = CompletionRequest.model_validate({**SEARCH, "n": 4})
    ask_for_beams(fields, [submit_of(60 * 16 + 5, 4, 155), submit_of(1, 4, 399)], INFO)
    with pytest.raises(
        ApiError, match="may need 104 KV blocks of 16 tokens, and the engine has 100"
    ) as refused:
        ask_for_beams(fields, [submit_of(60 * 16 + 5, 4, 156)], INFO)
    assert refused.value.status == 400 and refused.value.param == "n"


def test_a_search_of_no_stated_length_is_as_long_as_fits() -> None:
    fields = ChatRequest.model_validate({"model": MODEL, "n": 4, "use_beam_search": True, **CHAT})
    submit = submit_of(60 * 16 + 5, 4, 100_000)
    ask_for_beams(fields, [submit], INFO)
    assert submit.max_tokens == 155
    with pytest.raises(ApiError, match="shorten the prompt"):
        ask_for_beams(fields, [submit_of(97 * 16 + 15, 4, 100)], INFO)


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
