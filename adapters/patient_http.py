"""Waits where a server says that its caller goes too fast: a script of a thousand uploads gets through."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

MOST_WAIT_S = 120.0
"""Of all waits for one call; a limit by the minute is over by then."""
_CURED_BY_WAITING = frozenset({"rate_limit_exceeded", "too_many_uploads"})
"""Codes of a 429. A key that is wrong too often stays wrong."""


class PatientClient(httpx.Client):
    """Sends a request again once the time is over that a 429 names in `Retry-After`.

    A body that is made while it is sent cannot be made again: its 429 goes to the caller.
    """

    def __init__(self, on_wait: Callable[[str, float], None], **options: Any) -> None:
        """`on_wait` is told the server's reason and for how many seconds it is waited; see httpx.Client."""
        super().__init__(**options)
        self._on_wait = on_wait

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """See httpx.Client."""
        left_s = MOST_WAIT_S
        while True:
            answer = super().send(request, **options)
            if answer.status_code != 429 or not isinstance(request.stream, httpx.ByteStream):
                return answer
            answer.read()
            wait_s, reason = _asked_to_wait(answer)
            if not 0 < wait_s <= left_s:
                return answer
            left_s -= wait_s
            self._on_wait(reason, wait_s)
            time.sleep(wait_s)


def _asked_to_wait(answer: httpx.Response) -> tuple[float, str]:
    """Returns for how many seconds, 0 where waiting is of no use, and why."""
    try:
        error = answer.json()["error"]
        wait_s = float(answer.headers["Retry-After"]) if error["code"] in _CURED_BY_WAITING else 0.0
        return wait_s, str(error["message"])
    except (ValueError, KeyError, TypeError):
        return 0.0, ""
