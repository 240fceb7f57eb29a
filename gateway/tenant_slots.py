"""How many uploads and downloads of one tenant run on this gateway at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.errors import ApiError

DOWNLOADS_PER_TENANT = 8
_RETRY_AFTER_S = 5


class Slots:
    """Slots for what takes a store, a disk or memory a while, so many for each tenant."""

    def __init__(self, per_tenant: int, refusal: Callable[[int], ApiError]) -> None:
        """`refusal` makes the error for a tenant that has all of its own, given how many these are."""
        self._per_tenant = per_tenant
        self._refusal = refusal
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Holds a slot for the block. Raises ApiError 429 when the tenant has all of its own."""
        if self._taken[tenant] >= self._per_tenant:
            raise self._refusal(self._per_tenant)
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]


def upload_slots(per_tenant: int) -> Slots:
    """Those for what moves or reads whole adapters."""
    return Slots(
        per_tenant,
        lambda most: too_many_uploads(f"{most} uploads or comparisons of this tenant run at the moment"),
    )


def download_slots() -> Slots:
    """Those for files that are sent from the store, and for lists of an adapter's files."""
    return Slots(
        DOWNLOADS_PER_TENANT,
        lambda most: _too_many(f"{most} files are sent or listed for this tenant now", "too_many_downloads"),
    )


def too_many_uploads(what: str) -> ApiError:
    """Returns the 429 that says `what` there is too much of."""
    return _too_many(what, "too_many_uploads")


def _too_many(what: str, code: str) -> ApiError:
    return ApiError(
        429,
        f"{what[0].upper()}{what[1:]}, the most that is allowed. Wait until one ends, then try again.",
        type="rate_limit_error",
        code=code,
        headers={"Retry-After": str(_RETRY_AFTER_S)},
    )
