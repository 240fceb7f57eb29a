"""The load generator sends what it was told to and reckons rightly, against a server with known answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from uvicorn import Config, Server

from benchmarks import serve

TOKENS_PER_WORD = 2
GAP_S = 0.02


@dataclass
class FakeServer:
    """Answers `ab` for each token, `GAP_S` apart; says that each word of a prompt is two tokens."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    fails: bool = False

    async def answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(body["max_tokens"]):
            yield f"data: {json.dumps({'choices': [{'index': 0, 'text': 'ab'}]})}\n\n"
            await asyncio.sleep(GAP_S)
        usage = {
            "prompt_tokens": TOKENS_PER_WORD * len(body["prompt"].split()),
            "completion_tokens": body["max_tokens"],
        }
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
        self.running -= 1


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    state = FakeServer()
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        if state.fails:
            return Response('{"error": "no"}', 503)
        state.bodies.append(await request.json())
        return StreamingResponse(state.answer(state.bodies[-1]), media_type="text/event-stream")

    server = Server(Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    state.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    yield state
    server.should_exit = True
    await serving


async def test_sends_what_was_asked_and_sums_up(fake: FakeServer) -> None:
    load = serve.Load(
        fake.url, ("a", "b"), "key", num_requests=6, concurrency=3, prompt_tokens=40, output_tokens=5
    )
    result = await serve.run(load)
    sent = fake.bodies[len(load.models) :]
    assert [body["model"] for body in sent].count("a") == [body["model"] for body in sent].count("b") == 3
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in sent)
    assert fake.most_running == 3
    assert result.requests == 6
    assert result.prompt_tokens == 6 * 40, "sized by what the server counted, two tokens a word"
    assert result.output_tokens == 30
    assert result.output_tokens_per_second == pytest.approx(30 / result.seconds, rel=0.01)
    assert 1000 * GAP_S <= result.inter_token_ms["p50"] < 50 * 1000 * GAP_S
    assert 0 < result.ttft_ms["p50"] <= result.ttft_ms["max"]
    assert len({body["prompt"] for body in sent}) == 6


async def test_requests_share_their_beginning_and_no_more(fake: FakeServer) -> None:
    load = serve.Load(
        fake.url, ("a",), num_requests=4, prompt_tokens=60, shared_prefix_tokens=40, output_tokens=1
    )
    await serve.run(load)
    words = [body["prompt"].split() for body in fake.bodies[1:]]
    assert len({tuple(each[:20]) for each in words}) == 1
    assert len({tuple(each[20:]) for each in words}) == 4
    assert all(len(each) == 30 for each in words)


async def test_a_rate_does_not_wait_for_answers(fake: FakeServer) -> None:
    load = serve.Load(fake.url, ("a",), num_requests=8, concurrency=1, rate=200.0, output_tokens=10)
    await serve.run(load)
    assert fake.most_running > 1


async def test_a_refusal_is_told(fake: FakeServer) -> None:
    fake.fails = True
    with pytest.raises(serve.ServerError, match="503"):
        await serve.run(serve.Load(fake.url, ("a",)))


def test_the_same_seed_gives_the_same_prompts() -> None:
    load = serve.Load("", ("a",), seed=3)
    assert serve.make_prompts(load, 1.0) == serve.make_prompts(load, 1.0)
    assert serve.make_prompts(load, 1.0) != serve.make_prompts(serve.Load("", ("a",), seed=4), 1.0)
