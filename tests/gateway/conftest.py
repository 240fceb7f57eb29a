"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.local_stack import LocalStack


@pytest.fixture
def local_stack(valkey_url: str, tmp_path: Path) -> Iterator[LocalStack]:
    """A ready gateway before one fake engine."""
    stack = LocalStack(valkey_url, tmp_path / "store", [FakeEngine("engine-1", valkey_url)])
    stack.start()
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.stop()
