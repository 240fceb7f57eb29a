"""What requests cost, by tenant and adapter, with a bounded number of labels.

At most `size` tenants have a label, and at most `size` pairs of such a tenant and an adapter. What others do
counts for `other`: adapters of a named tenant for `adapter="other"` beside it, other tenants for `other`
twice. TopLabels says which have labels. What keeps counters from going backwards:

- A request counts in one series from its beginning to its end, and one with requests under way stays.
- A pair that loses its label takes its counts with it. Were they added to `other`, that would seem to have
  had them all in this moment, and an alert on its rate would go off. The totals without labels keep them.
- It is remembered for a while, and goes on from where it was when it gets its label again. One that was
  forgotten begins at zero, which Prometheus takes for a restart, so that `rate` counts it rightly.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from gateway.exposition import Buckets
from gateway.top_labels import TopLabels

OTHER = "other"

_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 4, 8, 16, 32)
_INTER_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_REMEMBERED = 4

Pair = tuple[str, str]
"""A tenant and an adapter; the adapter is "" for the base model."""


class Series:
    """All that is counted under one pair of labels."""

    __slots__ = (
        "cached_tokens",
        "first_token",
        "input_tokens",
        "inter_token",
        "output_tokens",
        "queue",
        "rejections",
        "requests",
        "running",
    )

    def __init__(self) -> None:
        self.running = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        """By outcome and route."""
        self.rejections: Counter[str] = Counter()
        """By limit."""
        self.input_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.queue = Buckets(_QUEUE_BUCKETS)
        self.first_token = Buckets(_FIRST_TOKEN_BUCKETS)
        self.inter_token = Buckets(_INTER_TOKEN_BUCKETS)

    def add(self, other: Series) -> None:
        """Takes in what another series has counted."""
        self.running += other.running
        self.requests.update(other.requests)
        self.rejections.update(other.rejections)
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.queue.add(other.queue)
        self.first_token.add(other.first_token)
        self.inter_token.add(other.inter_token)


class RequestSeries:
    """The series, by their labels. For one thread: neither a request nor a scrape may run beside another.

    Args:
        size: how many tenants, and how many pairs, have labels at most.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._shown: dict[Pair, Series] = {}
        self._hidden: OrderedDict[Pair, Series] = OrderedDict()
        self._forgotten = Series()
        self._tenants: TopLabels[str] = TopLabels(size, self._tenant_is_idle)
        self._pairs: TopLabels[Pair] = TopLabels(size, self._pair_is_idle)

    def use(self, tenant: str, adapter: str, amount: float) -> Series:
        """Counts a use of the pair, and returns the series that its next request belongs to."""
        return self._series(self._labels(tenant, adapter, amount))

    def named(self) -> Iterator[tuple[Pair, Series]]:
        """Yields each series with its labels."""
        yield from self._shown.items()

    def total(self) -> Series:
        """Returns the sum over all there ever were."""
        total = Series()
        for series in (self._forgotten, *self._hidden.values(), *self._shown.values()):
            total.add(series)
        return total

    def _labels(self, tenant: str, adapter: str, amount: float) -> Pair:
        if tenant == OTHER:  # whoever is really called so is not told apart from the rest
            return (OTHER, OTHER)
        if (lost := self._tenants.use(tenant, amount)) is not None:
            for pair in [pair for pair in self._shown if pair[0] == lost]:
                self._hide(pair)
        if tenant not in self._tenants:
            return (OTHER, OTHER)
        pair = (tenant, adapter)
        if adapter == OTHER:
            return pair
        if (lost_pair := self._pairs.use(pair, amount)) is not None:
            self._hide(lost_pair)
        return pair if pair in self._pairs else (tenant, OTHER)

    def _series(self, labels: Pair) -> Series:
        series = self._shown.get(labels)
        if series is None:
            series = self._shown[labels] = self._hidden.pop(labels, None) or Series()
        return series

    def _hide(self, pair: Pair) -> None:
        self._pairs.drop(pair)
        series = self._shown.pop(pair, None)
        if series is None:
            return
        self._hidden[pair] = series
        if len(self._hidden) > _REMEMBERED * self._size:
            self._forgotten.add(self._hidden.popitem(last=False)[1])

    def _tenant_is_idle(self, tenant: str) -> bool:
        return not any(series.running for pair, series in self._shown.items() if pair[0] == tenant)

    def _pair_is_idle(self, pair: Pair) -> bool:
        series = self._shown.get(pair)
        return series is None or not series.running
