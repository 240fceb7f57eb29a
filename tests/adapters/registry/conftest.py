from __future__ import annotations

import pytest
from redis.asyncio import Redis

from adapters.registry import Registry


@pytest.fixture
def registry(redis: Redis) -> Registry:
    return Registry(redis)
