"""What `/metrics` shows. Labels are few and bounded: nothing of a tenant, a key or an adapter."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 4, 8, 16, 32)
_INTER_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    """The gateway's metrics, in a registry of their own, so that several apps can live in one process.

    Args:
        others: what is shown besides, such as the engines' figures.
    """

    def __init__(self, *others: Collector) -> None:
        self.registry = CollectorRegistry()
        for other in others:
            self.registry.register(other)
        self.requests = Counter(
            "loraplex_requests",
            "Generation requests that ended.",
            ("route", "outcome"),
            registry=self.registry,
        )
        self.running = Gauge("loraplex_requests_running", "Generation requests now.", registry=self.registry)
        self.first_token = Histogram(
            "loraplex_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "loraplex_inter_token_seconds",
            "From one batch of a choice's tokens to the next; one token, unless the reader is slow.",
            buckets=_INTER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter("loraplex_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.cached_tokens = Counter(
            "loraplex_prompt_tokens_cached",
            "Prompt tokens from an engine's prefix cache.",
            registry=self.registry,
        )
        self.completion_tokens = Counter(
            "loraplex_completion_tokens", "Tokens generated for clients.", registry=self.registry
        )
        self.engines_ready = Gauge(
            "loraplex_engines_ready", "Engines that can take requests.", registry=self.registry
        )

    def render(self) -> bytes:
        """Returns the text that Prometheus reads."""
        return generate_latest(self.registry)
