"""Which few of very many keys are worth a label of their own.

A label costs a series in every family, here and in Prometheus, so their number is bounded, whatever tenants
and adapters there are. The first keys that come get the places. Of those that come later the heaviest are
remembered, by *space saving* (Metwally et al., ICDT 2005): a new key takes the place of the lightest that is
remembered, together with its count, which it is charged as an error. So whatever makes up more than one in
`_REMEMBERED * size` of their use is among them, and `count - error` is certainly its own. Once that is twice
what the lightest labelled key has, the two change places: twice, so that keys of about equal use do not do so
all the time. Counts halve every ten minutes, so that use means use of late, and an idle key gives way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")

_REMEMBERED = 4
_MARGIN = 2.0
_HALF_LIFE_S = 600.0


@dataclass(slots=True)
class _Count:
    count: float
    error: float

    @property
    def certain(self) -> float:
        return self.count - self.error


class TopLabels(Generic[Key]):
    """The keys that have labels, at most `size`.

    Args:
        may_go: whether a key may lose its label now.
        clock: seconds; time.monotonic, but for tests.
    """

    def __init__(
        self, size: int, may_go: Callable[[Key], bool], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._size = size
        self._may_go = may_go
        self._clock = clock
        self._labelled: dict[Key, float] = {}
        self._waiting: dict[Key, _Count] = {}
        self._halved_at = clock()

    def __contains__(self, key: Key) -> bool:
        return key in self._labelled

    def use(self, key: Key, amount: float) -> Key | None:
        """Counts a use, for which a key may get a label. Returns the key that lost its own to it, if any."""
        self._age()
        if key in self._labelled:
            self._labelled[key] += amount
            return None
        if len(self._labelled) < self._size:
            self._waiting.pop(key, None)
            self._labelled[key] = amount
            return None
        counted = self._count(key, amount)
        enough = counted.certain / _MARGIN
        lighter = (other for other, own in self._labelled.items() if own < enough and self._may_go(other))
        lightest = min(lighter, key=self._labelled.__getitem__, default=None)
        if lightest is None:
            return None
        del self._waiting[key]
        self._labelled[key] = counted.certain
        self._waiting[lightest] = _Count(self._labelled.pop(lightest), 0.0)
        return lightest

    def drop(self, key: Key) -> None:
        """Takes a key's label away; it may get one again."""
        self._labelled.pop(key, None)

    def _count(self, key: Key, amount: float) -> _Count:
        counted = self._waiting.get(key)
        if counted is None:
            counted = _Count(0.0, 0.0)
            if len(self._waiting) >= _REMEMBERED * self._size:
                lightest = min(self._waiting, key=lambda other: self._waiting[other].count)
                inherited = self._waiting.pop(lightest).count
                counted = _Count(inherited, inherited)
            self._waiting[key] = counted
        counted.count += amount
        return counted

    def _age(self) -> None:
        periods = int((self._clock() - self._halved_at) / _HALF_LIFE_S)
        if not periods:
            return
        self._halved_at += periods * _HALF_LIFE_S
        factor = 0.5**periods
        for key in self._labelled:
            self._labelled[key] *= factor
        for counted in self._waiting.values():
            counted.count *= factor
            counted.error *= factor
