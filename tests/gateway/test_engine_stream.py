"""What a request has been told: when engines tell it again, and when they tell others more."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from gateway import engine_stream
from gateway.engine_link import Receiver
from gateway.engine_stream import EngineStream
from gateway.errors import ApiError
from protos.engine_pb2 import LinkRequest, Sampling, Submit, TokenLogprobs


class _NoEngines:
    def choose(self, submit: Submit, model_digest: bytes, excluded: set[str]) -> None:
        return None

    async def changed(self, timeout_s: float) -> None:
        raise AssertionError("nothing is placed")


def test_a_prompt_that_is_told_again_stays_whole_meanwhile() -> None:
    submit = Submit(prompt_tokens=[1, 2, 3, 4], seeds=[0, 1])
    stream = EngineStream(
        [submit], model_digest=b"", placer=_NoEngines(), resume_timeout_s=1.0, deadline=math.inf
    )
    told = [TokenLogprobs(chosen=-float(number)) for number in range(3)]
    stream.on_prompt_logprobs(0, 1, told[:2])
    stream.on_prompt_logprobs(0, 3, told[2:])
    assert stream.prompt_logprobs(0) == told
    stream.on_prompt_logprobs(1, 1, told[:2])
    assert stream.prompt_logprobs(0) == told


@pytest.mark.parametrize("count", [None, 0])
async def test_logprobs_that_others_have_asked_for_are_not_its_own(count: int | None) -> None:
    """An engine's message has a logprob for each token, or none, as any of those in it asks for some."""
    submit = Submit(prompt_tokens=[1], seeds=[0], sampling=Sampling(logprobs=count))
    stream = EngineStream(
        [submit], model_digest=b"", placer=_NoEngines(), resume_timeout_s=1.0, deadline=math.inf
    )
    told = [TokenLogprobs(chosen=-1.0)]
    if count is None:
        stream.on_tokens(0, [5], [])
    stream.on_tokens(0, [6], told)
    (delta,) = await stream.next()
    assert delta.logprobs == ([] if count is None else told)


class _Link:
    """Takes everything, and keeps it."""

    engine_id = "engine"

    def __init__(self) -> None:
        self.submitted: list[LinkRequest] = []
        self.aborted: list[int] = []

    def submit(self, message: LinkRequest, receiver: Receiver, choices: Sequence[int]) -> int:
        self.submitted.append(message)
        return len(self.submitted)

    def abort(self, request_id: int, choice: int | None = None) -> None:
        self.aborted.append(request_id)


class _OneEngine:
    """A link, while there is one."""

    def __init__(self) -> None:
        self.link: _Link | None = _Link()

    def choose(self, submit: Submit, model_digest: bytes, excluded: set[str]) -> _Link | None:
        return self.link

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.01))


def _stream(placer: object, resume_timeout_s: float = 1.0) -> EngineStream:
    return EngineStream(
        [Submit(prompt_tokens=[1], seeds=[0, 1])],
        model_digest=b"",
        placer=placer,  # type: ignore[arg-type]
        resume_timeout_s=resume_timeout_s,
        deadline=time.monotonic() + 600,
    )


async def test_what_was_closed_before_it_began_reaches_no_engine() -> None:
    """As a client does that goes while Redis is asked whether its request may run."""
    placer = _OneEngine()
    stream = _stream(placer)
    stream.close()
    stream.begin()
    await stream.wait_started()
    assert await stream.next() == [] and stream._alarm is None
    stream.close()
    assert placer.link is not None and (placer.link.submitted, placer.link.aborted) == ([], [])


async def test_after_each_loss_there_is_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    placer, now = _OneEngine(), time.monotonic()
    first = placer.link
    monkeypatch.setattr(engine_stream, "time", SimpleNamespace(monotonic=lambda: now))
    stream = _stream(placer, resume_timeout_s=30.0)
    stream.begin()
    stream.on_lost([0, 1])
    placer.link = second = _Link()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert first is not None and first.submitted and second.submitted, "it waits in a queue now"
    now += 40.0
    placer.link = None
    stream.on_lost([0, 1])
    await asyncio.sleep(0.05)
    assert not waiting.done(), "the second loss has just happened"
    now += 31.0
    with pytest.raises(ApiError, match="engine"):
        await waiting
    stream.close()
