"""What a request has been told: when engines tell it again, and when they tell others more."""

from __future__ import annotations

import math

import pytest

from gateway.engine_stream import EngineStream
from protos.engine_pb2 import Sampling, Submit, TokenLogprobs


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
