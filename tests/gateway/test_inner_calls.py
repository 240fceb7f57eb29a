"""Calls of routes from within the gateway whose caller goes before their stream begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI, Request, Response

from gateway.inner_calls import InnerCalls
from gateway.origin import Origin
from gateway.sse import EventStream


@pytest.mark.parametrize("late", [False, True], ids=["while it is made", "when it has been made"])
async def test_a_stream_that_nobody_will_read_is_ended_at_once(late: bool) -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def stream() -> AsyncGenerator[bytes]:
        try:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"
        finally:
            ended.set()

    events = stream()  # held here as well: it is not the collector that ends it

    async def endpoint(request: Request, caller: Any) -> Response:
        await request.body()
        first = await anext(events)
        running.set()
        if late:
            reading.cancel()
        else:
            await request.receive()
        return EventStream(first, events, on_disconnect=lambda: None)

    call = InnerCalls(FastAPI(), {"/v1": endpoint}).prepare(
        "/v1", b"{}", caller=Mock(), origin=Origin("chat")
    )

    async def read() -> list[Any]:
        return [event async for event in call.events()]

    reading = asyncio.create_task(read())
    await running.wait()
    if not late:
        reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert ended.is_set()
