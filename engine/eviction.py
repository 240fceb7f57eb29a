"""Which of the adapters that nobody uses goes first: GreedyDual-Size.

Least recently used alone would treat an adapter that waits in host memory, a millisecond away, as one that
has to be read again, and one of sixteen pages as one of one page. GreedyDual-Size (Cao and Irani, "Cost-Aware
WWW Proxy Caching Algorithms", USITS 1997) gives each entry the value ``inflation at its last use + cost /
size``. The least value goes, and becomes the inflation: so what has not been used for long is overtaken by
whatever is used, however dear it is. With equal costs it is least recently used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

Cost = Callable[[bytes], float]
"""What it would cost to bring an entry back, for each unit of the room that it takes."""

_COPY_COST = 1.0
_READ_COST = 5.0
_FIND_COST = 1.0


def reload_cost(num_pages: int, *, in_host: bool) -> float:
    """What it costs to bring an adapter to the device, for each page that it takes there.

    In units of copying one page from host memory. To read one is some six times as dear, a sixth of that
    whatever its size (SmolLM2, rank 8: 0.85 and 5 ms), so small ones are dearer for their room.
    """
    return _COPY_COST if in_host else _READ_COST + _FIND_COST / num_pages


class GreedyDual:
    """The order in which entries go. Holds no entries' contents; costs are asked for when one has to go.

    `ranked` looks at every candidate: evictions are as rare as loads, and a load takes far longer.
    """

    def __init__(self) -> None:
        self._inflation = 0.0
        self._now = 0
        self._used: dict[bytes, tuple[float, int]] = {}
        """By entry: the inflation at its last use, and when that was, which decides between equals."""

    def use(self, digest: bytes) -> None:
        """Notes that an entry has come, or was used."""
        self._now += 1
        self._used[digest] = (self._inflation, self._now)

    def forget(self, digest: bytes) -> None:
        """Drops an entry that has gone for another reason than `evicted`."""
        self._used.pop(digest, None)

    def ranked(self, candidates: Iterable[bytes], cost: Cost) -> list[bytes]:
        """The candidates, the one to go first at the front."""
        values = self._values(candidates, cost)
        return sorted(values, key=lambda digest: values[digest])

    def evicted(self, digest: bytes, cost: Cost) -> None:
        """Drops an entry that had to go, and raises the inflation to its value."""
        value, _ = self._values([digest], cost)[digest]
        self._inflation = max(self._inflation, value)
        del self._used[digest]

    def _values(self, candidates: Iterable[bytes], cost: Cost) -> Mapping[bytes, tuple[float, int]]:
        return {
            digest: (self._used[digest][0] + cost(digest), self._used[digest][1]) for digest in candidates
        }
