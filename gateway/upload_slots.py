"""How many uploads of one tenant run on this gateway at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import ApiError

_RETRY_AFTER_S = 5


class UploadSlots:
    """Slots for what moves or reads whole adapters, so many for each tenant."""

    def __init__(self, per_tenant: int) -> None:
        self._per_tenant = per_tenant
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Holds a slot for the block. Raises ApiError 429 when the tenant has all of its own."""
        if self._taken[tenant] >= self._per_tenant:
            raise too_many_uploads(
                f"{self._per_tenant} uploads or comparisons of this tenant run at the moment"
            )
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]


def too_many_uploads(what: str) -> ApiError:
    """Returns the 429 that says `what` there is too much of."""
    return ApiError(
        429,
        f"{what[0].upper()}{what[1:]}, the most that is allowed. Wait until one ends, then try again.",
        type="rate_limit_error",
        code="too_many_uploads",
        headers={"Retry-After": str(_RETRY_AFTER_S)},
    )
