"""The metrics: labels are bounded, counters never go backwards, and sums are what happened."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from openai import OpenAI
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.exposition import Buckets, Exposition, label_text
from gateway.metrics import REQUEST_FAMILIES, Metrics, RequestMetrics
from gateway.request_series import OTHER
from gateway.top_labels import TopLabels
from tests.gateway.local_stack import LocalStack

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
DIGEST = b"\x05" * 32
GAUGES = {"loraplex_requests_running", "loraplex_tenant_requests_running"}


def samples_of(text: str) -> Samples:
    """Every sample, by name and labels; fails where two are the same."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


# ---- which keys have labels -------------------------------------------------------------------------------


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Top:
    """TopLabels with three places, a clock, and keys that are busy."""

    busy: set[str] = field(default_factory=set)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.labels: TopLabels[str] = TopLabels(3, lambda key: key not in self.busy, clock=self.clock)

    def named(self, *keys: str) -> str:
        return "".join(key for key in keys if key in self.labels)


def test_the_first_keys_get_labels_and_equal_ones_do_not_push_them_out() -> None:
    top = Top()
    for _ in range(50):
        for key in "abcde":
            assert top.labels.use(key, 1) is None
    assert top.named(*"abcde") == "abc"


def test_a_key_of_twice_the_use_takes_the_place_of_the_lightest() -> None:
    top = Top()
    for key, amount in (("a", 30), ("b", 10), ("c", 20), ("d", 20)):
        assert top.labels.use(key, amount) is None
    assert top.labels.use("d", 1) == "b"
    assert top.named(*"abcd") == "acd"


def test_a_busy_key_keeps_its_label() -> None:
    top = Top(busy={"b"})
    for key, amount in (("a", 30), ("b", 10), ("c", 20)):
        top.labels.use(key, amount)
    assert top.labels.use("d", 39) is None
    assert top.labels.use("d", 2) == "c"
    top.busy = set("abd")
    assert top.labels.use("e", 1e9) is None


def test_what_was_used_long_ago_counts_little() -> None:
    top = Top()
    for key in "abc":
        top.labels.use(key, 1000)
    top.clock.now += 24 * 3600
    top.labels.use("a", 5)
    assert top.labels.use("d", 1) in ("b", "c")
    assert "a" in top.labels


def test_a_heavy_key_is_found_among_very_many_light_ones() -> None:
    top, rng = Top(), random.Random(1)
    for key in "abc":
        top.labels.use(key, 100)
    for number in range(12):
        top.labels.use(f"old-{number}", 5)  # as many as are remembered
    for number in range(20_000):
        top.labels.use(f"light-{rng.randrange(5000)}", 1)
        if number % 8 == 0:
            top.labels.use("heavy", 1)
    assert "heavy" in top.labels
    assert not any(f"light-{number}" in top.labels for number in range(5000))


# ---- what is counted --------------------------------------------------------------------------------------


def run(metrics: Metrics, tenant: str, adapter: str, tokens: int, outcome: str = "completed") -> None:
    """One request from its beginning to its end."""
    request = metrics.request(tenant, adapter, "chat")
    request.begin()
    request.first_token(0.07)
    request.inter_token(0.004)
    request.end(outcome, input_tokens=tokens, cached_tokens=tokens // 2, output_tokens=1, queue_s=0.002)


def pairs_in(samples: Samples) -> set[tuple[str, str]]:
    """The pairs of tenant and adapter that any sample has."""
    found = (dict(labels) for name, labels in samples if name.startswith("loraplex_tenant_"))
    return {(labels["tenant"], labels["adapter"]) for labels in found}


def test_labels_are_bounded_and_counters_never_go_backwards() -> None:
    """Six tenants and eight adapters, whose shares change all the time, for four places of each."""
    metrics, rng = Metrics(labels=4), random.Random(7)
    shares = [rng.random() for _ in range(8)]
    under_way: list[tuple[RequestMetrics, int]] = []
    counted, tokens_ended, returns = 0, 0, 0
    last: Samples = {}
    pairs: set[tuple[str, str]] = set()
    seen: set[tuple[str, str]] = set()
    for turn in range(60):
        for _ in range(20):
            [number] = rng.choices(range(8), shares)
            tenant, adapter = f"tenant-{number % 6}", rng.choice(("", f"adapter-{number}"))
            if rng.random() < 0.1:
                metrics.rejected(tenant, adapter, "requests_per_minute")
            request = metrics.request(tenant, adapter, "chat")
            request.begin()
            under_way.append((request, rng.randrange(1, int(100 * 1.15**turn))))  # so that ranks change
            if len(under_way) > 3:
                request, tokens = under_way.pop(rng.randrange(len(under_way)))
                request.inter_token(0.01)
                request.end("completed", input_tokens=tokens, cached_tokens=0, output_tokens=1)
                counted, tokens_ended = counted + 1, tokens_ended + tokens
        shares = [share * rng.uniform(0.3, 1) + 1e-9 for share in shares]
        shares[rng.randrange(8)] = 2.0
        samples = samples_of(metrics.render().decode())
        before, pairs = pairs, pairs_in(samples)
        returns += len((pairs - before) & seen)
        seen |= pairs
        assert len({tenant for tenant, _ in pairs} - {OTHER}) <= 4
        assert len([pair for pair in pairs if pair[1] != OTHER]) <= 4
        counters = {key: v for key, v in samples.items() if key[0] not in GAUGES}
        for key in counters.keys() & last.keys():
            assert counters[key] >= last[key], key
        last |= counters
    assert returns > 5, "no label has come back, so this shows little"
    assert value(samples, "loraplex_prompt_tokens_total") == tokens_ended
    assert value(samples, "loraplex_requests_total", outcome="completed", route="chat") == counted
    assert value(samples, "loraplex_requests_running") == len(under_way)
    assert value(samples, "loraplex_inter_token_seconds_count") == counted


def test_the_heaviest_are_named_and_the_rest_is_other() -> None:
    metrics = Metrics(labels=2)
    for tenant in ("early", "quiet", "late"):
        run(metrics, tenant, "sql", 10)
    for _ in range(5):
        run(metrics, "late", "sql", 100)
    for adapter in ("a", "b", "c"):
        run(metrics, "late", adapter, 1)
    samples = samples_of(metrics.render().decode())
    pairs = pairs_in(samples)
    assert {tenant for tenant, _ in pairs} == {"late", OTHER} | {"early", "quiet"} & {t for t, _ in pairs}
    assert ("late", "sql") in pairs and ("late", OTHER) in pairs
    rest = value(
        samples,
        "loraplex_tenant_requests_total",
        tenant="late",
        adapter=OTHER,
        outcome="completed",
        route="chat",
    )
    assert 2 <= rest <= 3


def test_a_label_that_comes_back_goes_on_from_where_it_was() -> None:
    metrics = Metrics(labels=1)
    run(metrics, "a", "", 10)
    for _ in range(3):
        run(metrics, "b", "", 100)
    assert ("a", "") not in pairs_in(samples_of(metrics.render().decode()))
    for _ in range(20):
        run(metrics, "a", "", 100)
    samples = samples_of(metrics.render().decode())
    assert value(samples, "loraplex_tenant_prompt_tokens_total", tenant="a", adapter="") >= 110
    assert value(samples, "loraplex_prompt_tokens_total") == 10 + 300 + 2000


def test_who_has_requests_under_way_keeps_the_label() -> None:
    metrics = Metrics(labels=1)
    request = metrics.request("a", "sql", "chat")
    request.begin()
    for _ in range(5):
        run(metrics, "b", "", 1000)  # which would be the heavier tenant
        run(metrics, "a", "", 1000)  # which would be the heavier adapter
    assert pairs_in(samples_of(metrics.render().decode())) == {("a", "sql"), ("a", OTHER), (OTHER, OTHER)}
    request.end("completed", input_tokens=1, cached_tokens=0, output_tokens=1)
    run(metrics, "b", "", 10_000)
    assert ("b", "") in pairs_in(samples_of(metrics.render().decode()))


def test_totals_keep_what_nobody_remembers() -> None:
    metrics = Metrics(labels=1)
    for number in range(12):
        run(metrics, f"tenant-{number}", "", 3**number)
    samples = samples_of(metrics.render().decode())
    assert ("tenant-11", "") in pairs_in(samples)
    assert value(samples, "loraplex_prompt_tokens_total") == sum(3**number for number in range(12))
    assert value(samples, "loraplex_queue_seconds_count") == 12


def test_names_that_mean_the_rest_take_no_place() -> None:
    metrics = Metrics(labels=1)
    for tenant in (OTHER, "a", "b"):
        run(metrics, tenant, OTHER, 10)
        run(metrics, tenant, "sql", 10)
    samples = samples_of(metrics.render().decode())
    assert pairs_in(samples) == {("a", "sql"), ("a", OTHER), (OTHER, OTHER)}
    assert value(samples, "loraplex_tenant_prompt_tokens_total", tenant=OTHER, adapter=OTHER) == 40


def test_a_token_costs_no_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(labels=2)
    request = metrics.request("acme", "sql", "chat")
    request.begin()

    def no_look_up(*_: object) -> None:
        raise AssertionError("a token looked a label up")

    with monkeypatch.context() as patch:
        patch.setattr("gateway.request_series.RequestSeries.use", no_look_up)
        for _ in range(3):
            request.inter_token(0.01)
    samples = samples_of(metrics.render().decode())
    assert value(samples, "loraplex_tenant_inter_token_seconds_count", tenant="acme", adapter="sql") == 3


# ---- how it is written ------------------------------------------------------------------------------------


def test_a_histogram_is_written_as_the_client_library_writes_it() -> None:
    registry, bounds = CollectorRegistry(), (0.01, 0.1, 1, 32)
    theirs = Histogram("x_seconds", "How long.", ("tenant",), buckets=bounds, registry=registry)
    ours = Buckets(bounds)
    for seconds in (0.0, 0.01, 0.010001, 0.5, 1.0, 32.5):
        theirs.labels('a"\\\n').observe(seconds)
        ours.observe(seconds)
    text = Exposition()
    text.family("x_seconds", "histogram", "How long.")
    text.histogram(label_text(tenant='a"\\\n'), ours)
    expected = samples_of(generate_latest(registry).decode())
    assert samples_of(text.encode().decode()) == {
        key: v for key, v in expected.items() if not key[0].endswith("_created")
    }


def test_every_family_of_requests_is_there_from_the_start() -> None:
    families = {family.name for family in text_string_to_metric_families(Metrics().render().decode())}
    for family in REQUEST_FAMILIES:
        assert {f"loraplex_{family.name}", f"loraplex_tenant_{family.name}"} <= families


# ---- over HTTP --------------------------------------------------------------------------------------------


@pytest.fixture
def client(local_stack: LocalStack) -> Iterator[OpenAI]:
    with local_stack.client(local_stack.add_tenant("acme")) as client:
        yield client


def scrape(stack: LocalStack) -> Samples:
    return samples_of(httpx.get(f"{stack.url}/metrics").text)


def test_requests_are_counted_for_who_made_them_and_what_they_asked(
    local_stack: LocalStack, client: OpenAI
) -> None:
    local_stack.add_adapter("acme", "sql", DIGEST)
    local_stack.add_adapter("owner", "shared", DIGEST)
    grants = local_stack.app.state.services.registry.grants
    local_stack.call(grants.grant("owner", "shared", "acme"))
    asked = {"sql@1": "sql", "tiny": "", "owner/shared": "owner/shared"}
    usages = {}
    for model, adapter in asked.items():
        answer = client.completions.create(
            model=model, prompt="Hello", max_tokens=7, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        usages[adapter] = answer.usage
    samples = scrape(local_stack)
    for adapter, usage in usages.items():
        labels = {"tenant": "acme", "adapter": adapter}
        assert value(samples, "loraplex_tenant_prompt_tokens_total", **labels) == usage.prompt_tokens
        assert value(samples, "loraplex_tenant_completion_tokens_total", **labels) == usage.completion_tokens
        assert usage.prompt_tokens_details is not None
        cached = value(samples, "loraplex_tenant_prompt_tokens_cached_total", **labels)
        assert cached == usage.prompt_tokens_details.cached_tokens
        ended = labels | {"outcome": "completed", "route": "completions"}
        assert value(samples, "loraplex_tenant_requests_total", **ended) == 1
        for name in ("queue", "time_to_first_token"):
            assert value(samples, f"loraplex_tenant_{name}_seconds_count", **labels) == 1
        assert value(samples, "loraplex_tenant_inter_token_seconds_count", **labels) >= 1
    assert value(samples, "loraplex_completion_tokens_total") == 21
