"""How a gateway talks to Redis: fail fast, and come back at once when Redis does."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

_CONNECT_TIMEOUT_S = 1.0


def connect(url: str) -> Redis:
    """Returns a client with a pool of its own; it connects when first used, and the caller must close it.

    One retry, at once: it replaces a pooled connection that broke while Redis was restarted. The client's own
    default, to back off for seconds, would hold up requests that can be answered from memory.
    """
    return Redis.from_url(url, retry=Retry(NoBackoff(), 1), socket_connect_timeout=_CONNECT_TIMEOUT_S)
