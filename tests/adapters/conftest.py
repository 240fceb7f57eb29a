from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
async def redis(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[Redis]:
    """A client of an empty server, with replies as bytes and as text: both kinds work."""
    async with Redis.from_url(valkey_url, decode_responses=request.param) as client:
        yield client
