"""How a gateway talks to Redis: fail fast, and come back at once when Redis does."""

from __future__ import annotations

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

_CONNECT_TIMEOUT_S = 1.0
_ANSWER_TIMEOUT_S = 2.0
_MAX_CONNECTIONS = 64


def connect(url: str) -> Redis:
    """Returns a client with a pool of its own; it connects when first used, and the caller must close it.

    One retry, at once: it replaces a pooled connection that broke while Redis was restarted. The client's own
    default, to back off for seconds, would hold up requests that can be answered from memory. No call waits
    for ever on a Redis that hangs; and a burst of requests waits for one of some connections, rather than
    each opening its own.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MAX_CONNECTIONS,
        timeout=_CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1),
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_timeout=_ANSWER_TIMEOUT_S,
    )
    return Redis.from_pool(pool)
