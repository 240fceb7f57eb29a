"""How long a request may take."""

from __future__ import annotations

import time

import pytest

from gateway.deadlines import deadline_of


@pytest.mark.parametrize(("headers", "left_s"), [({}, 300.0), ({"x-request-timeout": "200"}, 100.0)])
def test_what_was_done_before_counts(headers: dict[str, str], left_s: float) -> None:
    """A long prompt was read and tokenised meanwhile, say."""
    deadline = deadline_of(headers, 400.0, arrived_at=time.perf_counter() - 100.0)
    assert deadline - time.monotonic() == pytest.approx(left_s, abs=50.0)
