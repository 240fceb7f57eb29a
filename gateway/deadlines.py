"""How long a request may take, waiting and generating together."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gateway.errors import invalid_request

TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 86_400.0


def deadline_of(headers: Mapping[str, str], default_s: float, *, arrived_at: float) -> float:
    """Returns when a request must have ended that came at `arrived_at`, of `time.perf_counter`; by
    `time.monotonic`.

    The client's `X-Request-Timeout` counts, in seconds; without one, `default_s`. Raises ApiError 400 for a
    header that is no number of seconds above 0 and up to a day.
    """
    text = headers.get(TIMEOUT_HEADER)
    gone_s = time.perf_counter() - arrived_at
    return time.monotonic() - gone_s + (default_s if text is None else _seconds(text))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:  # false for a NaN as well
        raise invalid_request(
            f"The header X-Request-Timeout must be seconds, above 0 and at most {MAX_TIMEOUT_S:.0f}.",
            param="X-Request-Timeout",
            code="invalid_value",
        )
    return seconds
