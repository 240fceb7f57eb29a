"""The operations page has every metric, with its labels; its alerts and queries ask for what is there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adapters.leases import EngineLease
from gateway.accounts.entry import Outcome
from gateway.accounts.writer import LedgerWriter
from gateway.engine_metrics import EngineMetrics
from gateway.ledger_metrics import LedgerMetrics
from gateway.metrics import REQUEST_FAMILIES, Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
TWIN_LABELS = frozenset({"tenant", "adapter"})

Labels = frozenset[str]


@pytest.fixture(scope="module")
def samples() -> dict[str, Labels]:
    """By the name of each sample the labels of it, in a gateway where everything has happened once."""
    lease = EngineLease("engine-1", "127.0.0.1:1", "tiny", bytes(32), 64)
    writer = cast(LedgerWriter, SimpleNamespace(waiting=1, dropped=1))
    metrics = Metrics(EngineMetrics(lambda: [lease]), LedgerMetrics(writer))
    request = metrics.request("acme", "sql", "chat")
    request.begin()
    request.end("completed", input_tokens=1, cached_tokens=1, output_tokens=1)
    metrics.rejected("acme", "sql", "requests_per_minute")
    metrics.responded("/v1/models", 200)
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        sample.name: frozenset(sample.labels) - {"le"} for family in families for sample in family.samples
    }


def is_twin(name: str) -> bool:
    return name.startswith("loraplex_tenant_")


def in_the_table() -> dict[str, Labels]:
    rows = "\n".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `loraplex_"))
    found = re.findall(r"`(loraplex_\w+)(?:\{([\w,]+)\})?`", rows)
    assert len(found) == len({name for name, _ in found}), "a metric is in the table twice"
    return {name: frozenset(labels.split(",")) - {""} for name, labels in found}


def test_the_table_has_every_metric_with_its_labels(samples: dict[str, Labels]) -> None:
    parts = ("_bucket", "_count", "_sum")
    shown = {re.sub(f"({'|'.join(parts)})$", "", name): labels for name, labels in samples.items()}
    assert in_the_table() == {name: labels for name, labels in shown.items() if not is_twin(name)}


def test_what_is_there_by_tenant_is_what_the_page_says(samples: dict[str, Labels]) -> None:
    twins = {name.replace("_tenant_", "_"): labels for name, labels in samples.items() if is_twin(name)}
    assert {name: samples[name] | TWIN_LABELS for name in twins} == twins
    rows = list(in_the_table())
    requests, tokens = rows.index("loraplex_requests_total"), rows.index("loraplex_completion_tokens_total")
    assert {name.removesuffix("_total") for name in rows[requests : tokens + 1]} == {
        f"loraplex_{family.name}" for family in REQUEST_FAMILIES
    }


def test_alerts_and_queries_ask_for_what_is_there(samples: dict[str, Labels]) -> None:
    asked = re.findall(
        r"\b(loraplex_\w+)(\{[^}]*\})?", "".join(re.findall(r"(?s)```(?:yaml|promql)\n.*?```", PAGE))
    )
    assert len(asked) > 15
    for name, selector in asked:
        assert name in samples, name
        assert set(re.findall(r"(\w+)=", selector)) <= samples[name], name
        for word in re.findall(r'outcome=~?"([\w|]+)"', selector):
            assert set(word.split("|")) <= set(Outcome), word
        assert set(re.findall(r'class="(\w+)"', selector)) <= {"2xx", "4xx", "5xx"}, selector
    for by in re.findall(r"\b(?:sum|max) by \(([\w, ]+)\)", PAGE):
        assert set(by.split(", ")) <= frozenset().union(*samples.values()) | {"le"}, by
