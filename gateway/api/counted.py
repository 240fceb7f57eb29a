"""Counts the calls that no other limit counts, before they do anything: see `gateway.accounts.calls`."""

from __future__ import annotations

from fastapi import Request

from gateway.accounts.calls import CHANGES, MANAGEMENT, TOKENIZATION, tokenization_calls
from gateway.services import Services


async def count_management(request: Request) -> None:
    """A dependency of what manages adapters and keys, behind the one that finds the caller.

    A change also counts for its day, but not each part of an upload. Raises ApiError 429.
    """
    is_change = request.method in ("POST", "PUT", "DELETE")
    limits = (MANAGEMENT, CHANGES) if is_change else (MANAGEMENT,)
    await _services(request).calls.take(request.state.caller.tenant_id, limits)


async def count_tokenization(request: Request) -> None:
    """Counts a call whose body has been read, by its size. Raises ApiError 429."""
    amount = tokenization_calls(request.state.body_bytes)
    await _services(request).calls.take(request.state.caller.tenant_id, (TOKENIZATION,), amount)


def _services(request: Request) -> Services:
    return request.app.state.services
