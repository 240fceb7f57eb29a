"""An engine that computes nothing: it answers a request as soon as it reads it, with the prompt's own tokens.

    python -m benchmarks.echo_engine --redis-url redis://127.0.0.1:6379 --step-ms 12.5

Speaks the link as a real engine does, and serves SmolLM2's tokenizer. Without steps, one message holds a
whole answer. With steps, one message a step holds a token of each stream, whatever the reader's pace.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import cycle, islice

from engine.model.gguf import GgufFile
from engine.model.gguf_tokenizer import tokenizer_files
from examples.smollm2 import gguf_file
from protos import engine_pb2 as pb
from tests.gateway.fake_engine import FakeEngine

VOCAB_SIZE = 49_152
"""SmolLM2's."""


@dataclass(slots=True)
class Stream:
    """A request of one choice that is under way."""

    request_id: int
    tokens: cycle[int]
    left: int


class EchoEngine(FakeEngine):
    """Answers at once, or by steps of `step_s` where that is not 0."""

    def __init__(self, redis_url: str, step_s: float) -> None:
        super().__init__("echo", redis_url, step_s=step_s)
        self._files = tokenizer_files(GgufFile(gguf_file()).metadata)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: object) -> pb.ModelInfo:
        info = await super().GetModelInfo(request, context)
        info.vocab_size = VOCAB_SIZE
        return info

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: object
    ) -> AsyncIterator[pb.FileChunk]:
        for name, data in self._files.items():
            for at in range(0, len(data), 1 << 20):
                yield pb.FileChunk(name=name, data=data[at : at + (1 << 20)])

    async def Link(
        self, requests: AsyncIterator[pb.LinkRequest], context: object
    ) -> AsyncIterator[pb.LinkResponse]:
        if not self.step_s:
            async for message in requests:
                if message.HasField("submit"):
                    yield _whole_answer(message.submit)
            return
        streams: dict[int, Stream] = {}
        reader = asyncio.create_task(_read(requests, streams))
        try:
            due = time.monotonic()
            while not reader.done():
                due = max(due + self.step_s, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
                if streams:
                    yield _step(streams)
        finally:
            reader.cancel()


async def _read(requests: AsyncIterator[pb.LinkRequest], streams: dict[int, Stream]) -> None:
    async for message in requests:
        if message.HasField("submit"):
            submit = message.submit
            streams[submit.request_id] = Stream(
                submit.request_id, cycle(list(submit.prompt_tokens)), submit.max_tokens
            )
        elif message.HasField("abort"):
            streams.pop(message.abort.request_id, None)


def _whole_answer(submit: pb.Submit) -> pb.LinkResponse:
    count = submit.max_tokens
    return pb.LinkResponse(
        request_ids=[submit.request_id] * count,
        choices=[0] * count,
        tokens=islice(cycle(submit.prompt_tokens), count),
        started=[pb.Started(request_id=submit.request_id)],
        finished=[_length(submit.request_id)],
    )


def _step(streams: dict[int, Stream]) -> pb.LinkResponse:
    message = pb.LinkResponse(
        request_ids=list(streams),
        choices=[0] * len(streams),
        tokens=[next(stream.tokens) for stream in streams.values()],
    )
    for stream in list(streams.values()):
        stream.left -= 1
        if not stream.left:
            message.finished.append(_length(stream.request_id))
            del streams[stream.request_id]
    return message


def _length(request_id: int) -> pb.Finished:
    return pb.Finished(request_id=request_id, reason=pb.FINISH_REASON_LENGTH)


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--step-ms", type=float, default=0.0, help="0: answer at once")
    options = parser.parse_args()
    engine = EchoEngine(options.redis_url, options.step_ms / 1000)
    await engine.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main())
