"""Counts the calls that no other limit counts, before they do anything: see `gateway.accounts.calls`."""

from __future__ import annotations

from fastapi import Request

from gateway.accounts.calls import (
    CHANGES,
    FILE_CALLS,
    FILE_CHANGES,
    MANAGEMENT,
    TOKENIZATION,
    CallLimit,
    tokenization_calls,
)
from gateway.services import Services


async def count_management(request: Request) -> None:
    """A dependency of what manages adapters and keys, behind the one that finds the caller.

    A change also counts for its day, but not each part of an upload. Raises ApiError 429.
    """
    await _count(request, MANAGEMENT, CHANGES)


async def count_file_calls(request: Request) -> None:
    """The same for files and batches. Raises ApiError 429."""
    await _count(request, FILE_CALLS, FILE_CHANGES)


async def _count(request: Request, calls: CallLimit, changes: CallLimit) -> None:
    is_change = request.method in ("POST", "PUT", "DELETE")
    limits = (calls, changes) if is_change else (calls,)
    await _services(request).calls.take(request.state.caller.tenant_id, limits)


async def count_tokenization(request: Request) -> None:
    """Counts a call whose body has been read, by its size. Raises ApiError 429."""
    amount = tokenization_calls(request.state.body_bytes)
    await _services(request).calls.take(request.state.caller.tenant_id, (TOKENIZATION,), amount)


def _services(request: Request) -> Services:
    return request.app.state.services
