"""How the ledger of this gateway does, as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.accounts.writer import LedgerWriter


class LedgerMetrics(Collector):
    """Makes metrics of the writer, whenever Prometheus asks."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    def collect(self) -> Iterator[Metric]:
        """Yields what waits for Redis, and what could be kept nowhere."""
        yield GaugeMetricFamily(
            "loraplex_ledger_waiting",
            "Records of requests that Redis has not taken yet, in memory and on the disk.",
            value=self._writer.waiting,
        )
        yield CounterMetricFamily(
            "loraplex_ledger_dropped",
            "Records that neither Redis nor the disk took, and for which there was no more memory.",
            value=self._writer.dropped,
        )
