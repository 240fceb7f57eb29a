from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from tests.adapters.s3_server import S3Server, aws_variables, s3_server


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
async def redis(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[Redis]:
    """A client of an empty server, with replies as bytes and as text: both kinds work."""
    async with Redis.from_url(valkey_url, decode_responses=request.param) as client:
        yield client


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server with an empty bucket, which this process' AWS variables name."""
    _s3_server.reset()
    for name, value in aws_variables(_s3_server).items():
        monkeypatch.setenv(name, value)
    return _s3_server
