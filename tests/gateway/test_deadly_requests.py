"""A request that is the reason why engines die does not walk through all there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from gateway.beam_stream import BeamStream
from gateway.engine_link import EngineLink
from gateway.engine_stream import EngineStream
from gateway.errors import ApiError
from protos.engine_pb2 import Beams, LinkRequest, Started, Submit


class _Engines:
    """Takes whatever comes, and keeps the choices of each submission."""

    engine_id = "engine"

    def __init__(self) -> None:
        self.taken: list[Sequence[int]] = []
        self.news = asyncio.Event()

    def choose(self, submit: Submit, model_digest: bytes, excluded: set[str]) -> EngineLink:
        return cast(EngineLink, self)

    async def changed(self, timeout_s: float) -> None:
        raise AssertionError("there is always an engine")

    def submit(self, message: LinkRequest, receiver: Any, choices: Sequence[int]) -> int:
        self.taken.append(choices)
        self.news.set()
        return len(self.taken)

    def abort(self, request_id: int, wire_choice: int | None = None) -> None:
        """Nothing runs."""

    async def next(self) -> Sequence[int]:
        async with asyncio.timeout(60):
            await self.news.wait()
        self.news.clear()
        return self.taken[-1]


def stream_of(engines: _Engines, submit: Submit, kind: type[EngineStream] = EngineStream) -> EngineStream:
    deadline = time.monotonic() + 600
    return kind([submit], model_digest=b"", placer=engines, resume_timeout_s=60, deadline=deadline)


@pytest.mark.parametrize("kind", [EngineStream, BeamStream])
async def test_with_the_third_engine_that_is_lost_it_ends(
    kind: type[EngineStream], caplog: pytest.LogCaptureFixture
) -> None:
    engines = _Engines()
    beams = Beams() if kind is BeamStream else None
    submit = Submit(prompt_tokens=[1], seeds=[0, 1], tenant="acme", adapter_digest=b"\xab" * 32, beams=beams)
    stream = stream_of(engines, submit, kind)
    answer = asyncio.create_task(stream.next())
    for _ in range(3):
        choices = await engines.next()
        stream.on_started(choices, Started())
        stream.on_lost(choices)
    with pytest.raises(ApiError, match="3 engines were lost while they computed this request") as ended:
        await answer
    assert (ended.value.status, ended.value.code) == (500, "engines_lost")
    assert len(engines.taken) == 3
    (record,) = caplog.records
    assert "tenant acme with adapter abababababab" in record.message
    stream.close()


async def test_who_only_waited_in_lost_engines_goes_on() -> None:
    engines = _Engines()
    stream = stream_of(engines, Submit(prompt_tokens=[1], seeds=[0]))
    answer = asyncio.create_task(stream.next())
    for _ in range(5):
        stream.on_lost(await engines.next())
    for _ in range(2):
        choices = await engines.next()
        stream.on_started(choices, Started())
        stream.on_lost(choices)
    stream.on_tokens(0, [7], [])
    assert (await answer)[0].tokens == [7]
    stream.close()


async def test_choices_that_are_lost_once_each_are_no_reason() -> None:
    engines = _Engines()
    stream = stream_of(engines, Submit(prompt_tokens=[1], seeds=[0, 1, 2, 3]))
    answer = asyncio.create_task(stream.next())
    choices = await engines.next()
    stream.on_started(choices, Started())
    for choice in choices:
        stream.on_lost([choice])
    while sum(map(len, engines.taken)) < 8:
        await engines.next()
    stream.on_tokens(0, [7], [])
    assert (await answer)[0].tokens == [7]
    stream.close()
