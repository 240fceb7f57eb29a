"""One connection on which Redis pushes: what it says counts, how late it is, and when it is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.redis_push import _Wire

SUBSCRIBED = b">3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"
OLD_SUBSCRIBED = b"*" + SUBSCRIBED[1:]
MESSAGE = b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n"
OLD_MESSAGE = b"*" + MESSAGE[1:]
PONG, OLD_PONG = b"+PONG\r\n", b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
MOVING = b">3\r\n$8\r\nMIGRATED\r\n:1\r\n:2\r\n"


class Line:
    """A wire over a transport that is none, and what it has pushed."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, Any]] = []
        self.is_closing = False
        transport: Any = SimpleNamespace(
            get_protocol=asyncio.Protocol,
            set_protocol=lambda protocol: None,
            write=lambda data: None,
            is_closing=lambda: self.is_closing,
        )
        connection: Any = SimpleNamespace(_writer=SimpleNamespace(transport=transport))
        self.wire = _Wire(connection, lambda *what: self.pushed.append(what))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.pushed]


@pytest.mark.parametrize(
    ("subscribed", "message", "pong"),
    [(SUBSCRIBED, MESSAGE, PONG), (OLD_SUBSCRIBED, OLD_MESSAGE, OLD_PONG)],
    ids=["RESP3", "RESP2"],
)
def test_messages_are_no_answers_to_heartbeats(subscribed: bytes, message: bytes, pong: bytes) -> None:
    """A connection on which much comes, and all of it late, must not pass for one that is on time."""
    line = Line()
    for _ in range(3):
        line.wire.send(b"")
    line.wire.data_received(subscribed + message * 5)
    assert (line.wire.unanswered, line.kinds) == (2, ["subscribe"] + ["message"] * 5)
    for half in (pong[:3], pong[3:]):
        line.wire.data_received(half)
    assert line.wire.unanswered == 1
    line.wire.data_received(pong)
    assert line.wire.unanswered == 0


@pytest.mark.parametrize(
    "end", [b"-NOPERM no such channel for you\r\n", b"!3\r\nbad\r\n", MOVING], ids=["error", "blob", "push"]
)
def test_a_refusal_ends_it(end: bytes) -> None:
    line = Line()
    line.wire.send(b"")
    line.wire.data_received(SUBSCRIBED + end + MESSAGE)
    assert line.kinds == ["subscribe", "lost"]
    with pytest.raises(RedisConnectionError):
        line.wire.send(b"")


def test_what_is_no_redis_ends_it() -> None:
    line = Line()
    line.wire.data_received(b"HTTP/1.1 400 Bad Request\r\n")
    assert line.kinds == ["lost"]


def test_one_that_was_closed_here_says_nothing_when_it_goes() -> None:
    """With TLS that may be half a minute later, when the next one has long been followed."""
    line = Line()
    line.wire.closed = True
    line.wire.data_received(MESSAGE)
    line.wire.connection_lost(None)
    assert line.kinds == []


def test_one_that_goes_says_so_once_and_is_written_to_no_more() -> None:
    line = Line()
    line.wire.connection_lost(ConnectionResetError())
    line.wire.connection_lost(None)
    assert line.kinds == ["lost"]
    closing = Line()
    closing.is_closing = True
    for wire in (line.wire, closing.wire):
        with pytest.raises(RedisConnectionError):
            wire.send(b"")
