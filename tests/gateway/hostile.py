"""What tests of hostile requests share: how one is refused, raw connections, and who is held up meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.gateway.fake_engine import MODEL
from tests.gateway.local_stack import LocalStack

CHAT, TEXT, UPLOAD = "/v1/chat/completions", "/v1/completions", "/v1/adapters"
MIB = 1024 * 1024


def check_refused(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    """Checks that this is an error of the client's, in OpenAI's shape. Returns the error."""
    assert answer.status_code in (statuses or range(400, 500)), answer.text[:300]
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < 1000
    return error


def chat(**fields: Any) -> bytes:
    """A chat request; a `bytes` value goes into it as it is."""
    given = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields
    parts = [
        b'"%b":%b' % (name.encode(), value if isinstance(value, bytes) else json.dumps(value).encode())
        for name, value in given.items()
    ]
    return b"{" + b",".join(parts) + b"}"


def connect(client: httpx.Client) -> socket.socket:
    url = urlsplit(str(client.base_url))
    connection = socket.create_connection((url.hostname, url.port), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send_head(connection: socket.socket, client: httpx.Client, path: str, *headers: str) -> None:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        f"authorization: {client.headers['authorization']}",
        *headers,
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())


class Turns:
    """How much processor time the process takes between two turns of the stack's event loop, at most.

    Not by the clock, which a busy machine stretches: while nobody else holds the interpreter, a turn comes
    soon in terms of what the process itself has computed. What was there before is hidden from the garbage
    collector, as `loraplex gateway` hides it: to walk through all that tests have imported takes as long.
    """

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self.longest_s = 0.0

    def __enter__(self) -> Turns:
        gc.collect()
        gc.freeze()
        self._task = self._stack.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.call(self._stop())
        gc.unfreeze()

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._watch())

    async def _stop(self) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.process_time() - before)


def longest_turn(stack: LocalStack, ask: Callable[[], object]) -> float:
    """Processor seconds between two turns of the stack's event loop while it is asked, at most; the least of
    three tries where they are many, since what holds it up does so each time, and a host only now and then.
    """
    longest_s = 1.0
    for _ in range(3):
        with Turns(stack) as turns:
            ask()
        longest_s = min(longest_s, turns.longest_s)
        if longest_s < 0.05:
            break
    return longest_s
