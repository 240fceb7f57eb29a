"""Ports for servers that a test starts, and that nobody else is given meanwhile.

A port that is only looked up, and bound by a server a while later, may be somebody else's by then: another
test's, or that of an outgoing connection. So a socket stays bound to it, which never listens. Beside such a
socket servers can listen there, also once more after they were killed, since both set SO_REUSEADDR; but the
system gives the port to nobody who asks for any.
"""

from __future__ import annotations

import socket

_held: list[socket.socket] = []
"""Until this process ends: a test, or one after it, may start its server once more."""


def reserve_port() -> int:
    """A port of 127.0.0.1 that is free now and stays reserved for as long as this process lives."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return holder.getsockname()[1]


def reserve_ports(count: int) -> list[int]:
    """Several ports; see `reserve_port`."""
    return [reserve_port() for _ in range(count)]


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
