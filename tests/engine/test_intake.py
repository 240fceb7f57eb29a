"""Requests whose grammar takes its time, and what counts meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from engine.constraints import Grammars
from engine.link import Link
from engine.loop import EngineLoop
from engine.sequence import Request
from engine.service import NUM_LOOK_UPS, EngineService
from protos import engine_pb2 as pb

MODEL = pb.ModelInfo(vocab_size=100, max_model_len=50, max_num_seqs=8, num_rank_pages=4, num_blocks=64)


class FakeLoop:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)


class SlowGrammars:
    """Understands a grammar when it may, as one without rules."""

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()

    def understand(self, text: str) -> None:
        self.begun.set()
        assert self.may.wait(60)


class LookUps:
    """A store's look-ups, which hang until they may end."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.may = threading.Event()

    def on_disk(self, digest: bytes) -> bool:
        self.num_begun += 1
        return self.may.wait(120)


class Served:
    """A service that has no server, and one link to it."""

    def __init__(self) -> None:
        self.loop, self.grammars, self.look_ups = FakeLoop(), SlowGrammars(), LookUps()
        self.service = EngineService(
            cast(EngineLoop, self.loop),
            MODEL,
            {},
            self.look_ups.on_disk,
            cast(Grammars, self.grammars),
        )
        self.link = Link()

    def submit(self, request_id: int, **fields: Any) -> None:
        message = pb.Submit(
            request_id=request_id,
            **{"prompt_tokens": [1, 2], "seeds": [0], "max_tokens": 4, "grammar": "x", **fields},
        )
        assert self.service._intake.submit(self.link, message) is None

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    yield served
    served.grammars.may.set()
    served.look_ups.may.set()


async def test_a_request_whose_grammar_is_not_understood_in_time_ends_at_its_deadline(served: Served) -> None:
    served.submit(1, deadline_ms=100, seeds=[0, 1])
    async with asyncio.timeout(60):
        (news,) = await served.link.messages()
    ends = [(end.request_id, end.choice, end.reason, end.error) for end in news.finished]
    assert ends == [(1, 0, pb.FINISH_REASON_DEADLINE, ""), (1, 1, pb.FINISH_REASON_DEADLINE, "")]
    served.grammars.may.set()
    served.submit(2)
    await served.until(lambda: served.loop.requests)
    assert [request.request_id for request in served.loop.requests] == [2], "what has ended does not start"


async def test_a_deadline_counts_while_a_grammar_is_being_understood(served: Served) -> None:
    served.submit(1, deadline_ms=60_000)
    await served.until(served.grammars.begun.is_set)
    before = time.monotonic()
    served.grammars.may.set()
    await served.until(lambda: served.loop.requests)
    (request,) = served.loop.requests
    assert request.arrival <= before and request.deadline == request.arrival + 60


async def test_nothing_that_hangs_keeps_a_grammar_from_being_understood(served: Served) -> None:
    events = asyncio.get_running_loop()
    events.set_default_executor(ThreadPoolExecutor(1))
    events.run_in_executor(None, served.look_ups.on_disk, b"")  # as asyncio's own, of a host's name
    look_ups = [asyncio.ensure_future(served.service._is_on_disk(b"")) for _ in range(4 * NUM_LOOK_UPS)]
    await served.until(lambda: served.look_ups.num_begun == 1 + NUM_LOOK_UPS)
    served.grammars.may.set()
    served.submit(1)
    await served.until(lambda: served.loop.requests)
    for look_up in look_ups:
        look_up.cancel()
