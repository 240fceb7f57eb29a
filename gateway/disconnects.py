"""Noticing that a client has gone while its request runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope

EXTENSION = "loraplex.disconnects"
"""The extension of a scope whose `disconnects` are its connection's, where the server is ours."""


class Disconnects:
    """What is to be called when the client of one connection goes."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._gone = False

    def add(self, callback: Callable[[], None]) -> None:
        """Has it called, once; at once where the client has gone already."""
        if self._gone:
            callback()
        else:
            self._callbacks.append(callback)

    def remove(self, callback: Callable[[], None]) -> None:
        """Has it called no more."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def tell(self) -> None:
        """The client has gone."""
        self._gone = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class DisconnectWatch:
    """Calls back when the client of a request goes, for as
    long as the block runs. The body must have been read.

    Asks the connection to tell. Behind a server that is not ours, a task waits for the message that says it.
    """

    def __init__(self, scope: Scope, receive: Receive, on_disconnect: Callable[[], None]) -> None:
        self._disconnects: Disconnects | None = (
            scope.get("extensions", {}).get(EXTENSION, {}).get("disconnects")
        )
        self._receive = receive
        self._on_disconnect = on_disconnect
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> DisconnectWatch:
        if self._disconnects is not None:
            self._disconnects.add(self._on_disconnect)
        else:
            self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._disconnects is not None:
            self._disconnects.remove(self._on_disconnect)
        if self._task is not None:
            self._task.cancel()  # nobody waits for its end: it only waits itself
            self._task = None  # whose traceback refers to this: the request would be left to the collector

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_disconnect()
