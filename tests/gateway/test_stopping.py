"""What a client reads when the server stops before its answer is complete: why, not a broken connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, cast

import pytest

from gateway.accounts.headers import NO_STANDINGS
from gateway.api.answer import _answer
from gateway.errors import ApiError
from gateway.schemas.chat import ChatRequest
from gateway.sse import DONE, EventStream


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_stream_ends_with_an_error_event() -> None:
    sent: list[Any] = []
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        try:
            await never()
            yield b""
        finally:
            closed.set()

    async def send(message: Any) -> None:
        sent.append(message)

    stream = EventStream(b"first", events(), on_disconnect=lambda: None)
    serving = asyncio.create_task(stream({"type": "http", "path": "/"}, never, send))
    while len(sent) < 2:
        await asyncio.sleep(0)
    serving.cancel()
    await serving
    assert closed.is_set()
    last = sent[-1]
    assert not last["more_body"] and last["body"].endswith(DONE)
    error = json.loads(last["body"].removeprefix(b"data: ").removesuffix(DONE))["error"]
    assert (error["code"], error["message"]) == ("engine_unavailable", "The server is stopping. Try again.")


class Waiting:
    """A generation that never gets anything."""

    admission = NO_STANDINGS

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    start = next = staticmethod(never)


class Connection:
    scope: ClassVar[dict[str, Any]] = {}
    receive = staticmethod(never)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_has_not_begun_is_refused(stream: bool) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = ChatRequest.model_validate({"model": "tiny", "messages": messages, "stream": stream})
    call = _answer(cast(Any, Connection()), cast(Any, Waiting()), cast(Any, None), body, choices=1)
    answering = asyncio.create_task(call)
    for _ in range(100):  # until it waits
        await asyncio.sleep(0)
    answering.cancel()
    with pytest.raises(ApiError) as caught:
        await answering
    assert caught.value.status == 503 and caught.value.headers == {"Retry-After": "1"}
