"""What engines say of themselves in their leases, as metrics of this gateway.

Engines have no HTTP of their own, and every gateway knows all of them. So each gateway shows every engine's
figures under the engine's id: with several gateways, take one's, or the `max` by engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adapters.leases import EngineLease

_PREFIX = "loraplex_engine_"


@dataclass(frozen=True)
class _Family:
    """A metric, and for each value of its second label the name of the figure in the lease.

    A metric without a second label has one figure, under "".
    """

    name: str
    documentation: str
    label: str
    figures: dict[str, str]
    is_counter: bool = True


_FAMILIES = (
    _Family(
        "adapter_requests",
        "Requests for adapters, by where the adapter was when they came.",
        "tier",
        {"device": "requests_device", "host": "requests_host", "none": "requests_cold"},
    ),
    _Family(
        "adapter_loads",
        "Loads of adapters into host memory, by source.",
        "source",
        {"disk": "loads_disk", "store": "loads_store"},
    ),
    _Family(
        "adapter_load_seconds",
        "What these loads took, in all.",
        "source",
        {"disk": "load_seconds_disk", "store": "load_seconds_store"},
    ),
    _Family(
        "adapter_loads_undone",
        "Loads that failed, and those dropped before they began, since nobody waited any more.",
        "reason",
        {"failed": "loads_failed", "cancelled": "loads_cancelled"},
    ),
    _Family("adapter_copies", "Copies of adapters to the device.", "to", {"device": "copies"}),
    _Family(
        "adapter_copy_seconds",
        "How long the engine's loop took to start these copies, in all.",
        "to",
        {"device": "copy_seconds"},
    ),
    _Family(
        "adapter_evictions",
        "Adapters that had to leave a tier for others.",
        "tier",
        {"device": "evictions_device", "host": "evictions_host"},
    ),
    _Family(
        "adapter_yields",
        "Times that an adapter's running sequences stood back so that another's could run.",
        "tier",
        {"device": "yields"},
    ),
    _Family(
        "rank_pages",
        "Rank pages on the device.",
        "state",
        {"all": "num_pages", "free": "num_free_pages", "pinned": "num_pinned_pages"},
        is_counter=False,
    ),
    _Family(
        "adapter_bytes",
        "Bytes of adapters' copies in host memory.",
        "tier",
        {"host": "host_bytes"},
        is_counter=False,
    ),
    _Family(
        "fairness_gap",
        "Weighted service, in tokens, between the most and the least served of the tenants that have work.",
        "",
        {"": "fairness_gap"},
        is_counter=False,
    ),
    _Family(
        "refusals",
        "Requests refused because a queue was full: that of their tenant, or that of all.",
        "queue",
        {"tenant": "refused_tenant_queue", "all": "refused_queue"},
    ),
    _Family("preemptions", "Times that a sequence gave its blocks back and waited.", "", {"": "preemptions"}),
    _Family(
        "seat_yields",
        "Times that a running sequence stood back so that another tenant's could run.",
        "",
        {"": "seat_yields"},
    ),
)


class EngineMetrics(Collector):
    """Makes metrics of the leases, whenever Prometheus asks.

    Args:
        leases: the engines that live, as this gateway knows them.
    """

    def __init__(self, leases: Callable[[], Collection[EngineLease]]) -> None:
        self._leases = leases

    def collect(self) -> Iterator[Metric]:
        """Yields each family with a sample for each engine and value of its label."""
        leases = self._leases()
        for family in _FAMILIES:
            kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
            labels = ("engine", family.label) if family.label else ("engine",)
            metric = kind(_PREFIX + family.name, family.documentation, labels=labels)
            for lease in leases:
                for value, figure in family.figures.items():
                    values = (lease.engine_id, value)[: len(labels)]
                    metric.add_metric(values, lease.adapters.get(figure, 0.0))
            yield metric
        yield self._by_tier(leases)
        yield self._sequences(leases)

    @staticmethod
    def _by_tier(leases: Collection[EngineLease]) -> Metric:
        metric = GaugeMetricFamily(
            _PREFIX + "adapters", "Adapters by the fastest tier that holds them.", labels=("engine", "tier")
        )
        for lease in leases:
            tiers = list(lease.residency.values())
            for tier in ("device", "host"):
                metric.add_metric((lease.engine_id, tier), tiers.count(tier))
        return metric

    @staticmethod
    def _sequences(leases: Collection[EngineLease]) -> Metric:
        metric = GaugeMetricFamily(
            _PREFIX + "sequences", "Sequences that run or wait.", labels=("engine", "state")
        )
        for lease in leases:
            metric.add_metric((lease.engine_id, "running"), lease.running)
            metric.add_metric((lease.engine_id, "waiting"), lease.waiting)
        return metric
