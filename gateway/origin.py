"""Where a request to the inference routes comes from, when it is not an HTTP client's own."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request


@dataclass(frozen=True, slots=True)
class Origin:
    """`route` is what the ledger and the metrics say. Background work runs in what all others leave over."""

    route: str
    is_background: bool = False


def origin_of(request: Request, route: str) -> Origin:
    """Returns what the request was made with; of a client's own, `route`."""
    return getattr(request.state, "origin", None) or Origin(route)
