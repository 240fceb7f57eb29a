"""How addresses are written, and whether a server could listen at one, asked before it tries."""

from __future__ import annotations

import errno
import socket


def address_of(host: str, port: int) -> str:
    """``host:port`` as URLs have it: with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def fault_of_port(host: str, port: int) -> str | None:
    """Returns why nobody can listen there, or None when all is well."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except UnicodeError:  # from a name that DNS has no form for
        return f"cannot be had on {host}: it is no host's name"
    except OSError as error:
        return "is taken" if error.errno == errno.EADDRINUSE else f"cannot be had on {host}: {error.strerror}"
    return None
