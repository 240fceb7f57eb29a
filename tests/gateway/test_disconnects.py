"""Watching for clients that go, with a connection that tells and without."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from gateway.disconnects import EXTENSION, Disconnects, DisconnectWatch


class Request:
    closed = 0

    def close(self) -> None:
        self.closed += 1


class Client:
    """What a server knows of a client."""

    def __init__(self, *, tells: bool) -> None:
        self.disconnects = Disconnects()
        self.scope: dict[str, Any] = {"type": "http"}
        if tells:
            self.scope["extensions"] = {EXTENSION: {"disconnects": self.disconnects}}
        self._gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def go(self) -> None:
        self._gone.set()
        self.disconnects.tell()


@pytest.fixture(params=[True, False], ids=["told", "asked"])
async def client(request: pytest.FixtureRequest) -> Client:
    return Client(tells=request.param)


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_client_that_goes_closes_its_request_once(client: Client) -> None:
    request = Request()
    async with DisconnectWatch(client.scope, client.receive, request.close):
        await _turns()
        assert request.closed == 0
        client.go()
        await _turns()
    assert request.closed == 1


async def test_a_client_that_had_gone_before_closes_it_too(client: Client) -> None:
    request = Request()
    client.go()
    async with DisconnectWatch(client.scope, client.receive, request.close):
        await _turns()
    assert request.closed == 1


async def test_a_request_that_has_ended_is_left_alone(client: Client) -> None:
    request = Request()
    async with DisconnectWatch(client.scope, client.receive, request.close):
        await _turns()
    client.go()
    await _turns()
    assert request.closed == 0


async def test_what_has_ended_is_not_left_to_the_collector(client: Client) -> None:
    request = Request()
    died = weakref.ref(request)
    gc.disable()
    try:
        async with DisconnectWatch(client.scope, client.receive, request.close):
            await _turns()
        await _turns()
        del request
        assert died() is None, "requests in cycles have a busy gateway collect garbage all the time"
    finally:
        gc.enable()
