"""Clients that go: whatever state their requests are in, nothing of them stays on the engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import httpx
import pytest

from protos import engine_pb2 as pb
from protos.engine_pb2_grpc import EngineStub
from tests.e2e.conftest import Tenants
from tests.e2e.processes import BASE, FOREVER, Stack

pytestmark = pytest.mark.e2e

MAX_SEQS = 8
LONG_PROMPT = [7 + index % 1000 for index in range(900)]  # seven steps of prefill
STEPS_TO_STOP = {"prefill": 6, "decode": 10}
"""Steps from the disconnect until the engine holds nothing. It takes one once it is told. In the others the
news passes through a gateway that may have to wait for its turn; on a quiet machine they are none or few."""
TRIES = 10
"""A busy machine may keep the gateway waiting for longer than that, but not time and again."""


class Engine:
    """The engine's own gRPC door, beside the gateway: what it holds, and the beat of its steps."""

    def __init__(self, stub: EngineStub) -> None:
        self.stub = stub
        self.steps = 0

    @classmethod
    @asynccontextmanager
    async def of(cls, stack: Stack) -> AsyncIterator[Engine]:
        async with grpc.aio.insecure_channel(stack.engine_address) as channel:
            yield cls(EngineStub(channel))

    async def references(self) -> int:
        """Sequences that run on adapters, as the engine's loop sees it between two steps."""
        answer = await self.stub.ListAdapters(pb.ListAdaptersRequest())
        return sum(adapter.references for adapter in answer.adapters)

    async def num_blocks(self) -> int:
        return (await self.stub.GetModelInfo(pb.GetModelInfoRequest())).num_blocks

    @asynccontextmanager
    async def sequences(self, count: int) -> AsyncIterator[None]:
        """Base sequences that run all the while. Each step gives each of them a token, and is counted."""
        submit = pb.Submit(
            request_id=1, prompt_tokens=[5, 6, 7], seeds=range(count), max_tokens=900, ignore_eos=True
        )

        async def submits() -> AsyncIterator[pb.LinkRequest]:
            yield pb.LinkRequest(submit=submit)
            await asyncio.Event().wait()

        async def count_steps() -> None:
            async for news in self.stub.Link(submits()):
                assert not news.finished, "the sequences must outlast the test"
                self.steps += list(news.choices).count(0)

        counting = asyncio.create_task(count_steps())
        await until(lambda: self.steps, "the sequences run")
        try:
            yield
            assert not counting.done(), counting
        finally:
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 90) -> None:
    """Polls a function, or a coroutine function, until it is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = condition()
            if await value if isinstance(value, Awaitable) else value:
                return
            await asyncio.sleep(0.002)


@asynccontextmanager
async def asking(stack: Stack, key: str, **body: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A request under way on a connection of its own. Cancelling the task closes the connection."""

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            answer = await client.post(
                f"{stack.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            raise AssertionError(f"the answer came before the client went: {answer.text}")

    task = asyncio.create_task(ask())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def assert_all_free(stack: Stack, engine: Engine) -> None:
    """Nothing runs or waits, no adapter is referenced, and every block can be had."""
    lease = await stack.renewed_lease()
    assert (lease.running, lease.waiting) == (0, 0)
    assert lease.free_blocks == await engine.num_blocks()
    assert await engine.references() == 0
    assert await stack.metric("loraplex_requests_running") == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_client_that_goes_frees_everything_at_once(
    stack: Stack, tenants: Tenants, stage: str, stream: bool
) -> None:
    for number in range(TRIES):
        salt = f"{stage} {stream} {number}"  # so that no prefix is known
        body = {"max_tokens": 100, "stream": stream, "cache_salt": salt} | FOREVER
        async with Engine.of(stack) as engine, engine.sequences(1):
            at_once = await is_free_at_once(stack, engine, tenants.acme, stage, body)
            assert (await stack.renewed_lease()).running == 1
        async with Engine.of(stack) as engine:
            await assert_all_free(stack, engine)
        if at_once:
            return
    raise AssertionError(f"it never took at most {STEPS_TO_STOP[stage]} steps")


async def is_free_at_once(stack: Stack, engine: Engine, key: str, stage: str, body: dict[str, Any]) -> bool:
    """Asks, and goes at some stage. Returns whether that was the stage, and the engine free soon after it."""
    first_tokens = "loraplex_time_to_first_token_seconds_count"
    prompt = LONG_PROMPT if stage == "prefill" else LONG_PROMPT[:5]
    before = await stack.metric(first_tokens)

    async def has_token() -> bool:
        return await stack.metric(first_tokens) > before

    async def is_free() -> bool:
        return await engine.references() == 0

    async with asking(stack, key, model="pirate", prompt=prompt, **body) as request:

        async def begun() -> bool:
            return request.done() or await engine.references() > 0

        await until(begun, "the request runs")
        if stage == "decode":
            await until(has_token, "a token has come")
        ran = await engine.references() == 1
        went_at = engine.steps
        request.cancel()
        await until(is_free, "the adapter is free")
        at_once = engine.steps - went_at <= STEPS_TO_STOP[stage]
    return ran and at_once and await has_token() == (stage == "decode")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_while_it_waits_is_forgotten(
    stack: Stack, tenants: Tenants, stream: bool
) -> None:
    async with Engine.of(stack) as engine:
        body = {"model": "pirate", "prompt": "Hello", "max_tokens": 100, "n": 2, "stream": stream} | FOREVER
        async with engine.sequences(MAX_SEQS), asking(stack, tenants.acme, **body) as request:

            async def waits() -> bool:
                return (await stack.lease()).waiting == 2

            await until(waits, "the request waits")
            request.cancel()
            lease = await stack.renewed_lease()
            assert (lease.running, lease.waiting) == (MAX_SEQS, 0)
        await assert_all_free(stack, engine)


async def test_a_burst_with_random_cancels_leaves_nothing(stack: Stack, tenants: Tenants) -> None:
    choose = random.Random(5)
    answered = {True: 0, False: 0}

    async def one() -> None:
        key, model = choose.choice(
            [(tenants.acme, BASE), (tenants.acme, "sql"), (tenants.acme, "wide"), (tenants.globex, "sql")]
        )
        body = {
            "model": model,
            "prompt": LONG_PROMPT[: choose.choice([3, 40, 150])],
            "n": choose.choice([1, 1, 3]),
            "max_tokens": choose.choice([4, 12, 24]),
            "temperature": choose.choice([0, 1]),
            "stream": choose.random() < 0.5,
        }
        patience_s = choose.choice([0.01, 0.1, 0.3, 1.0, None, None])
        await asyncio.sleep(choose.random())
        is_answered = False
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s), httpx.AsyncClient(timeout=120) as client:
                headers = {"Authorization": f"Bearer {key}"}
                answer = await client.post(
                    f"{stack.url}/v1/completions", json=body | FOREVER, headers=headers
                )
                assert answer.status_code == 200, answer.text
                assert not body["stream"] or answer.text.endswith("data: [DONE]\n\n")
                is_answered = True
        assert is_answered or patience_s is not None
        answered[is_answered] += 1

    await asyncio.gather(*(one() for _ in range(24)))
    assert min(answered.values()) >= 3, answered
    async with Engine.of(stack) as engine:
        await assert_all_free(stack, engine)
