"""Slows down whoever tries keys: after each wrong key of an address the next such answer is later, or 429.

A right key is never slowed, wherever it comes from: each key is judged first, and only the answer to a wrong
one waits. So nobody can lock a key out by guessing beside its owner, behind the same proxy say. Judging gives
nothing away, since a secret has 256 random bits; what is bounded here is what guesses cost the gateway.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ApiError

logger = logging.getLogger(__name__)

_DRAIN_S = 6.0
"""One failure of an address is forgotten in this time."""
_FREE = 10.0
"""So many failures are answered at once."""
_REFUSED = 60.0
"""Beyond these the answer is 429, at once. Between the two it waits, longer each time."""
_MOST = 80.0
"""Failures are counted up to here, so that it is over two minutes after the last."""
_FIRST_DELAY_S = 0.05
_DOUBLED_BY = 5.0
_LONGEST_DELAY_S = 2.0

_ALL_TOGETHER = 100.0
"""All addresses together may fail so many times as often as one."""
_MOST_ADDRESSES = 4096
_MOST_WAITING = 256
_MOST_WAITING_OF_ADDRESS = 8


@dataclass(slots=True)
class _Failures:
    """A count that drains by one every `drain_s`, up to a most."""

    drain_s: float
    most: float
    count: float = 0.0
    at: float = 0.0
    waiting: int = 0
    """Answers that are held back now."""

    def add(self, now: float) -> float:
        """Counts one failure. Returns the count with it."""
        drained = max(0.0, self.count - (now - self.at) / self.drain_s)
        self.count, self.at = min(self.most, drained + 1.0), now
        return self.count


class FailedLogins:
    """Counts failures by address, those of an IPv6 network together, in bounded memory.

    Where there are more addresses than are remembered, the one that failed longest ago is forgotten.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, most_addresses: int = _MOST_ADDRESSES
    ) -> None:
        self._clock = clock
        self._most_addresses = most_addresses
        self._by_address: OrderedDict[str, _Failures] = OrderedDict()
        self._all = _Failures(_DRAIN_S / _ALL_TOGETHER, _MOST * _ALL_TOGETHER)

    async def penalise(self, address: str) -> None:
        """Counts a failure and returns when it may be answered.

        Raises ApiError 429 where there were too many, or too many answers wait already.
        """
        own, now = self._failures_of(address), self._clock()
        before = own.count
        count = max(own.add(now), self._all.add(now) / _ALL_TOGETHER)
        if before <= _REFUSED < own.count:
            logger.warning("many wrong API keys come from %s; it gets 429 for a while", address)
        if count <= _FREE:
            return
        full = self._all.waiting >= _MOST_WAITING or own.waiting >= _MOST_WAITING_OF_ADDRESS
        if count > _REFUSED or full:
            raise _too_many(max(1.0, (count - _REFUSED + 1.0) * _DRAIN_S))
        for failures in (own, self._all):
            failures.waiting += 1
        try:
            await asyncio.sleep(_delay(count))
        finally:
            for failures in (own, self._all):
                failures.waiting -= 1

    def remembered(self) -> int:
        """How many addresses are."""
        return len(self._by_address)

    def _failures_of(self, address: str) -> _Failures:
        network = _network_of(address)
        found = self._by_address.get(network)
        if found is None:
            found = self._by_address[network] = _Failures(_DRAIN_S, _MOST)
            if len(self._by_address) > self._most_addresses:
                self._by_address.popitem(last=False)
        self._by_address.move_to_end(network)
        return found


def _delay(count: float) -> float:
    return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** ((count - _FREE) / _DOUBLED_BY))


def _network_of(address: str) -> str:
    """An IPv4 address itself; of an IPv6 one the /64, since a single customer has all of that."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket's, or whatever a proxy says
        return address[:64]
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed.packed[:8] + bytes(8), 64)))


def _too_many(retry_after_s: float) -> ApiError:
    return ApiError(
        429,
        "Too many wrong API keys come from here. Check yours: a right one is answered at once.",
        type="rate_limit_error",
        code="too_many_failed_authentications",
        headers={"Retry-After": str(math.ceil(retry_after_s))},
    )
