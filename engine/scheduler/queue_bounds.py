"""How many sequences may wait, of one tenant and in all, and when there is a place again."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.sequence import Refusal

RATE_STARTS = 64
"""The queue's rate is that of so many sequences that started last."""
MOST_RETRY_SECONDS = 60.0
"""No client is told to stay away for longer: what the queue does by then, nobody knows."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request is not taken, in a word and in a sentence, and when it may be; 0: not known."""

    refusal: Refusal
    why: str
    retry_after_s: float = 0.0


class QueueBounds:
    """Says which requests the queue has no place for.

    A tenant may not hold more places than it leaves free, so that one tenant's flood never fills the queue
    for the others (after Choudhury and Hahne, "Dynamic Queue Length Thresholds", 1998).

    Args:
        most: sequences that may wait in all.
        clock: seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._starts: deque[tuple[float, str]] = deque(maxlen=RATE_STARTS)
        self._num_refused = Counter[Refusal]()

    def figures(self) -> dict[str, float]:
        """How many requests had no place since the start, by name."""
        return {
            "refused_queue": self._num_refused[Refusal.QUEUE_FULL],
            "refused_tenant_queue": self._num_refused[Refusal.TENANT_QUEUE_FULL],
        }

    def note_start(self, tenant: str, count: int) -> None:
        """So many sequences of the tenant wait no more, and run for the first time."""
        self._starts.extend([(self._clock(), tenant)] * count)

    def refused(self, tenant: str, count: int, *, waiting: int, held: int) -> Refused | None:
        """Why ``count`` more sequences of a tenant may not wait; None if they may.

        Where the queue is full and half of it the tenant's own, that is the reason.

        Args:
            waiting: sequences that wait now, of all tenants.
            held: of these, the tenant's own.
        """
        free = self._most - waiting - count
        is_own = 0 < held <= waiting <= 2 * held
        if free < 0 and not is_own:
            why = f"{waiting} sequences are waiting already; try again later"
            return self._refuse(Refusal.QUEUE_FULL, why, self._seconds_until(-free))
        if held > free:
            why = f"{held} sequences of yours are waiting already; try again later"
            # Each that leaves is one fewer held, and one more free.
            departures = max(-free, math.ceil((held - free) / 2))
            seconds = self._seconds_until(departures, tenant)
            return self._refuse(Refusal.TENANT_QUEUE_FULL, why, seconds)
        return None

    def _refuse(self, refusal: Refusal, why: str, retry_after_s: float) -> Refused:
        self._num_refused[refusal] += 1
        return Refused(refusal, why, retry_after_s)

    def _seconds_until(self, departures: int, tenant: str | None = None) -> float:
        """How long it takes until so many sequences have started, of the tenant's if one is named."""
        if not self._starts:
            return 0.0
        span = self._clock() - self._starts[0][0]
        started = sum(tenant in (None, who) for _, who in self._starts)
        return min(MOST_RETRY_SECONDS, departures * span / max(1, started))
