"""What `/metrics` shows. Labels are bounded in number, and no key is among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.registry import Collector

from gateway.exposition import Buckets, Exposition, label_text
from gateway.request_series import RequestSeries, Series

_WATCHERS = frozenset({"/health", "/ready", "/metrics"})


class RequestMetrics:
    """Where one request is counted: call `begin`, then the others as often as they occur, then `end`.

    `first_token` and `inter_token` take seconds. They are bound by `begin`, so that a token costs no look-up.
    """

    __slots__ = ("_adapter", "_all", "_route", "_series", "_tenant", "first_token", "inter_token")

    first_token: Callable[[float], None]
    inter_token: Callable[[float], None]

    def __init__(self, all_series: RequestSeries, tenant: str, adapter: str, route: str) -> None:
        self._all, self._tenant, self._adapter, self._route = all_series, tenant, adapter, route

    def begin(self) -> None:
        """The request runs from now on."""
        self._series = self._all.use(self._tenant, self._adapter, 1)
        self._series.running += 1
        self.first_token = self._series.first_token.observe
        self.inter_token = self._series.inter_token.observe

    def end(
        self,
        outcome: str,
        *,
        input_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        queue_s: float | None = None,
    ) -> None:
        """The request has ended. `queue_s` is how long it was in an engine's queue, if it came out of it."""
        series = self._series
        series.running -= 1
        series.requests[outcome, self._route] += 1
        series.input_tokens += input_tokens
        series.cached_tokens += cached_tokens
        series.output_tokens += output_tokens
        if queue_s is not None:
            series.queue.observe(queue_s)
        self._all.use(self._tenant, self._adapter, input_tokens + output_tokens)


class Metrics:
    """The gateway's metrics, apart from those of other apps in this process.

    Args:
        others: what is shown besides, such as the engines' figures.
        labels: how many tenants, and how many of their adapters, are named at most.
    """

    def __init__(self, *others: Collector, labels: int = 50) -> None:
        self._registry = CollectorRegistry()
        for other in others:
            self._registry.register(other)
        self._requests = RequestSeries(labels)
        self.engines_ready = self._gauge("loraplex_engines_ready", "Engines that can take requests.")
        self.redis_up = self._gauge("loraplex_redis_up", "Whether Redis answers: 1 or 0.")
        self.store_up = self._gauge("loraplex_store_up", "Whether the store answers: 1 or 0.")
        self._responses = Counter({2: 0, 4: 0, 5: 0})  # by the first digit of their status

    def request(self, tenant: str, adapter: str, route: str) -> RequestMetrics:
        """Returns where a request that is about to begin is counted; `adapter` is "" for the base model."""
        return RequestMetrics(self._requests, tenant, adapter, route)

    def rejected(self, tenant: str, adapter: str, limit: str) -> None:
        """Counts a request that was refused because of a limit of this name."""
        self._requests.use(tenant, adapter, 1).rejections[limit] += 1

    def responded(self, path: str, status: int) -> None:
        """Counts the beginning of an answer, unless it is to those who watch this gateway."""
        if path not in _WATCHERS:
            self._responses[status // 100] += 1

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(name, documentation, registry=self._registry)

    def render(self) -> bytes:
        """Returns the text that Prometheus reads."""
        text = Exposition()
        total = self._requests.total()
        named = [
            (label_text(tenant=tenant, adapter=adapter), series)
            for (tenant, adapter), series in self._requests.named()
        ]
        text.family("loraplex_http_responses", "counter", "Answers by the class of their status.")
        for first, count in self._responses.items():
            text.sample(label_text(**{"class": f"{first}xx"}), count)
        for family in REQUEST_FAMILIES:
            text.family(f"loraplex_{family.name}", family.kind, family.documentation)
            family.write(text, "", total)
            text.family(f"loraplex_tenant_{family.name}", family.kind, family.documentation)
            for labels, series in named:
                family.write(text, labels, series)
        return generate_latest(self._registry) + text.encode()


@dataclass(frozen=True)
class RequestFamily:
    """A metric of requests: of all `loraplex_<name>`, by tenant and adapter `loraplex_tenant_<name>`."""

    name: str
    kind: str
    documentation: str
    values: Callable[[Series], Buckets | dict[str, int]]
    """The histogram, or the values by the text of their own labels."""

    def write(self, text: Exposition, labels: str, series: Series) -> None:
        """Adds the samples of one series."""
        values = self.values(series)
        if isinstance(values, Buckets):
            text.histogram(labels, values)
            return
        for own, value in values.items():
            text.sample(",".join(filter(None, (labels, own))), value)


def _by_outcome(series: Series) -> dict[str, int]:
    counts = series.requests.items()
    return {label_text(outcome=outcome, route=route): count for (outcome, route), count in counts}


def _by_limit(series: Series) -> dict[str, int]:
    return {label_text(limit=limit): count for limit, count in series.rejections.items()}


REQUEST_FAMILIES = (
    RequestFamily("requests", "counter", "Generation requests that ended.", _by_outcome),
    RequestFamily(
        "requests_running", "gauge", "Generation requests now.", lambda series: {"": series.running}
    ),
    RequestFamily("limit_rejections", "counter", "Requests refused because of a limit.", _by_limit),
    RequestFamily("prompt_tokens", "counter", "Tokens of prompts.", lambda series: {"": series.input_tokens}),
    RequestFamily(
        "prompt_tokens_cached",
        "counter",
        "Prompt tokens from an engine's prefix cache.",
        lambda series: {"": series.cached_tokens},
    ),
    RequestFamily(
        "completion_tokens",
        "counter",
        "Tokens generated for clients.",
        lambda series: {"": series.output_tokens},
    ),
    RequestFamily(
        "queue_seconds",
        "histogram",
        "From a request's arrival at an engine to its start.",
        lambda series: series.queue,
    ),
    RequestFamily(
        "time_to_first_token_seconds",
        "histogram",
        "From the arrival of a request to its first token.",
        lambda series: series.first_token,
    ),
    RequestFamily(
        "inter_token_seconds",
        "histogram",
        "From one batch of a choice's tokens to the next; one token, unless the reader is slow.",
        lambda series: series.inter_token,
    ),
)
