"""Who pays for bringing an adapter, and how much."""

from __future__ import annotations

from collections.abc import Callable

from engine.eviction import reload_cost


class LoadBills:
    """Notes for which tenant an adapter is brought, and what that has cost.

    The one for whom a load was begun pays for all of it, whoever uses the adapter then; a second tenant that
    waits for the same adapter, which only a grant makes possible, has a free ride, as it has in a prefix
    cache. Who goes before the load has ended pays as well, or naming adapters would cost nothing. What is
    brought for no request, such as a pinned adapter, is nobody's.

    The unit is a token of input: to copy one rank page to the device takes as long as to compute one (0.9 and
    0.85 ms: SmolLM2, on two cores), and reading costs what `engine.eviction.reload_cost` says.
    """

    def __init__(self) -> None:
        self._payer: dict[bytes, str] = {}
        self._bills: list[tuple[str, float]] = []

    def begin(self, digest: bytes, tenant: str) -> None:
        """A request of the tenant needs an adapter that is not on the device."""
        self._payer.setdefault(digest, tenant)

    def read(self, digest: bytes, num_pages: int) -> None:
        """The adapter has come to host memory."""
        if digest in self._payer:
            cost = (reload_cost(num_pages, in_host=False) - reload_cost(num_pages, in_host=True)) * num_pages
            self._bills.append((self._payer[digest], cost))

    def copied(self, digest: bytes, num_pages: int) -> None:
        """The adapter has come to the device; the next time is another load."""
        if digest in self._payer:
            cost = reload_cost(num_pages, in_host=True) * num_pages
            self._bills.append((self._payer.pop(digest), cost))

    def drop(self, digest: bytes) -> None:
        """The adapter will not come."""
        self._payer.pop(digest, None)

    def keep(self, is_wanted: Callable[[bytes], object]) -> None:
        """Forgets for whom an adapter is brought that is not wanted any more."""
        for digest in [digest for digest in self._payer if not is_wanted(digest)]:
            del self._payer[digest]

    def take(self) -> list[tuple[str, float]]:
        """What tenants owe since the last call, in tokens of input."""
        taken, self._bills = self._bills, []
        return taken
