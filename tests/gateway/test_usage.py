"""Usage: sums that add up whatever they are grouped by, single requests, and who sees what."""

from __future__ import annotations

import csv
import io
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway import usage
from gateway.accounts.entry import ERRORS, LedgerEntry, Outcome
from gateway.accounts.settle import Kind, LedgerScript, Record
from gateway.csv_text import to_csv
from gateway.prices import load_prices
from gateway.usage import COUNTS, GROUPS, plain
from tests.gateway.control_plane import OPERATOR_KEY, ControlPlane, control_plane
from tests.gateway.test_prices import LIST, written

OPERATOR = {"Authorization": f"Bearer {OPERATOR_KEY}"}
TOKENS = ("input_tokens", "cached_tokens", "output_tokens")
TODAY = datetime.now(UTC).date()
TENANTS = ("acme", "globex", "gone")
ADAPTERS = ("", "sql", "sql-fast", "owner/sql")


@pytest.fixture
async def plane(valkey_url: str, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    prices = written(tmp_path, LIST)
    async with control_plane(valkey_url, tmp_path, prices=prices) as plane:
        yield plane


def entries(count: int, *, seed: int = 1, tenants: Sequence[str] = TENANTS) -> list[LedgerEntry]:
    """Requests of the last four days."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        day = TODAY - timedelta(days=rng.randrange(4))
        came = datetime(day.year, day.month, day.day, rng.randrange(24), tzinfo=UTC)
        prompt = rng.randrange(1000)
        made.append(
            LedgerEntry(
                id=f"request-{number}",
                time=round(came.timestamp() * 1000) + number,
                tenant=rng.choice(tenants),
                key=f"key-{rng.randrange(2)}",
                model="sql@1",
                adapter=rng.choice(ADAPTERS),
                route="chat",
                input_tokens=prompt,
                cached_tokens=rng.randrange(prompt + 1),
                output_tokens=rng.randrange(200),
                ttft_ms=rng.choice((None, 12)),
                outcome=rng.choice(list(Outcome)),
            )
        )
    return made


async def settle(redis: Redis, made: Sequence[LedgerEntry], *, writer: str = "writer") -> None:
    """Has requests written as gateways do it."""
    records = [
        Record(number, entry.tenant, Kind.END, entry.to_wire()) for number, entry in enumerate(made, start=1)
    ]
    assert not await LedgerScript(redis, lease_ms=10_000).apply(writer, records)


def group_of(entry: LedgerEntry, group_by: Sequence[str]) -> tuple[str, ...]:
    day = datetime.fromtimestamp(entry.time / 1000, UTC).date().isoformat()
    return tuple(day if name == "day" else getattr(entry, name) for name in group_by)


def counts_of(entry: LedgerEntry) -> Counter[str]:
    tokens = {name: getattr(entry, name) for name in TOKENS}
    return Counter({"requests": 1, "errors": int(entry.outcome in ERRORS)} | tokens)


async def get(plane: ControlPlane, path: str, headers: Mapping[str, str], **query: Any) -> dict[str, Any]:
    answer = await plane.client.get(path, headers=headers, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_rows_are_what_was_used_and_totals_what_rows_add_up_to(
    plane: ControlPlane, tmp_path: Path
) -> None:
    made = entries(300)
    await settle(plane.services.redis, made)
    prices = load_prices(tmp_path / "prices.toml")
    for size in range(1, len(GROUPS) + 1):
        for group_by in itertools.combinations(GROUPS, size):
            counts: dict[tuple[str, ...], Counter[str]] = {}
            costs: dict[tuple[str, ...], Decimal] = {}
            for entry in made:
                group, tokens = group_of(entry, group_by), {name: getattr(entry, name) for name in TOKENS}
                counts.setdefault(group, Counter()).update(counts_of(entry))
                cost = prices.price(entry.tenant, entry.adapter).cost(**tokens)
                costs[group] = costs.get(group, Decimal(0)) + cost
            found = await get(plane, "/admin/usage", OPERATOR, group_by=group_by)
            rows, total = found["data"], found["total"]
            assert [tuple(row[name] for name in group_by) for row in rows] == sorted(counts)
            for row, group in zip(rows, sorted(counts), strict=True):
                assert {name: row[name] for name in COUNTS} == {name: counts[group][name] for name in COUNTS}
                assert (Decimal(row["cost"]), row["currency"]) == (costs[group], "EUR")
            assert {name: total[name] for name in COUNTS} == {
                name: sum(row[name] for row in rows) for name in COUNTS
            }
            assert Decimal(total["cost"]) == sum(Decimal(row["cost"]) for row in rows)


async def test_sums_are_made_beside_the_loop(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    await settle(plane.services.redis, entries(10))
    threads = []

    def note(name: str, function: Callable[..., Any]) -> None:
        def noted(*args: Any) -> Any:
            threads.append((name, threading.current_thread() is threading.main_thread()))
            return function(*args)

        monkeypatch.setattr(name, noted)

    note("gateway.usage._uses_of", usage._uses_of)
    note("gateway.api.usage.summarise", usage.summarise)
    await get(plane, "/admin/usage", OPERATOR)
    assert dict(threads) == {"gateway.usage._uses_of": False, "gateway.api.usage.summarise": False}


async def test_a_tenant_sees_its_own_and_the_operator_anybodys(plane: ControlPlane) -> None:
    headers = await plane.tenant("acme")
    admin_of_acme = await plane.tenant("acme", "admin")
    await plane.tenant("idle")
    made = entries(60)
    await settle(plane.services.redis, made)
    own = [entry for entry in made if entry.tenant == "acme"]
    found = await get(plane, "/v1/usage", headers, group_by="tenant")
    assert [row["tenant"] for row in found["data"]] == ["acme"]
    assert found["total"]["requests"] == len(own)
    by_operator = await get(plane, "/admin/usage", OPERATOR, tenant="acme", group_by="tenant")
    assert by_operator == found
    every = await get(plane, "/admin/usage", OPERATOR)
    assert [row["tenant"] for row in every["data"]] == sorted(
        TENANTS
    )  # one of them was never created, or is gone
    assert (await get(plane, "/admin/usage", OPERATOR, tenant="idle"))["data"] == []
    for path, key, status in (
        ("/admin/usage", headers, 403),
        ("/admin/usage?tenant=globex", admin_of_acme, 403),
        ("/admin/usage?tenant=nobody", OPERATOR, 404),
        ("/v1/usage", OPERATOR, 403),
        ("/v1/usage", {}, 401),
        ("/v1/usage/requests", {}, 401),
    ):
        assert (await plane.client.get(path, headers=key)).status_code == status, path


async def test_what_was_taken_back_leaves_no_row(plane: ControlPlane) -> None:
    headers = await plane.tenant("acme")
    await settle(plane.services.redis, entries(20, tenants=("acme",)))
    before = await get(plane, "/v1/usage", headers, group_by="adapter")
    sums = f"loraplex:{{acme}}:usage:{TODAY}"
    await plane.services.redis.hset(sums, "gone\x1fkey-0\x1frequests", "0")  # type: ignore[misc]
    assert await get(plane, "/v1/usage", headers, group_by="adapter") == before


async def test_a_period_begins_and_ends_with_its_days(plane: ControlPlane) -> None:
    headers = await plane.tenant("acme")
    made = entries(80, tenants=("acme",))
    await settle(plane.services.redis, made)
    per_day = Counter(group_of(entry, ("day",))[0] for entry in made)
    first, last = sorted(per_day)[1:3]
    found = await get(plane, "/v1/usage", headers, since=first, until=last)
    assert {row["day"]: row["requests"] for row in found["data"]} == {d: per_day[d] for d in (first, last)}
    assert (found["since"], found["until"]) == (first, last)
    default = await get(plane, "/v1/usage", headers)
    assert default["total"]["requests"] == len(made)
    assert date.fromisoformat(default["until"]) - date.fromisoformat(default["since"]) == timedelta(days=29)


@pytest.mark.parametrize(
    "query",
    [
        "since=2026-02-01&until=2026-01-01",
        "since=2024-01-01&until=2026-01-01",
        "since=yesterday",
        "group_by[0]=model",
        "format=xml",
    ],
)
async def test_what_cannot_be_asked_is_refused(plane: ControlPlane, query: str) -> None:
    headers = await plane.tenant("acme")
    answer = await plane.client.get("/v1/usage?" + query.replace("[0]", ""), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]
    assert (await plane.client.get("/v1/usage?until=0001-01-05", headers=headers)).status_code == 200


async def test_single_requests_come_page_by_page_each_once(plane: ControlPlane) -> None:
    headers = await plane.tenant("acme")
    made = entries(450, tenants=("acme", "globex"))
    await settle(plane.services.redis, made)
    seen: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": 70}
    for later in range(100):
        if later == 2:  # what is entered meanwhile comes before the first page, and moves nothing
            await settle(plane.services.redis, [replace(made[0], id="late", tenant="acme")], writer="another")
        page = await get(plane, "/v1/usage/requests", headers, **query)
        seen += page["data"]
        if not page["has_more"]:
            break
        query["cursor"] = page["next_cursor"]
    own = [entry for entry in made if entry.tenant == "acme"]
    newest = await get(plane, "/v1/usage/requests", headers, limit=1)
    assert newest["data"][0]["id"] == "late"
    assert [row["id"] for row in seen] == [entry.id for entry in reversed(own)]
    for row, entry in zip(seen, reversed(own), strict=True):
        assert {name: row[name] for name in TOKENS} == {name: getattr(entry, name) for name in TOKENS}
        assert datetime.fromisoformat(row["time"]).timestamp() == pytest.approx(entry.time / 1000, abs=1e-6)
        assert (row["outcome"], row["ttft_ms"]) == (entry.outcome, entry.ttft_ms)
        assert "tenant" not in row


async def test_single_requests_of_an_adapter_a_key_or_a_time(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = await plane.tenant("acme")
    made = entries(450, tenants=("acme",))  # more than are read at a time
    await settle(plane.services.redis, made)

    async def ids(**query: Any) -> set[str]:
        page = await get(plane, "/v1/usage/requests", headers, limit=1000, **query)
        return {row["id"] for row in page["data"]}

    assert await ids(adapter="sql") == {entry.id for entry in made if entry.adapter == "sql"}
    assert await ids(adapter="", key="key-1") == {
        entry.id for entry in made if not entry.adapter and entry.key == "key-1"
    }
    now = datetime.now(UTC)
    minute = timedelta(minutes=5)
    assert len(await ids(since=(now - minute).isoformat(), until=(now + minute).isoformat())) == len(made)
    assert not await ids(since=(now + minute).isoformat())
    with in_tokyo(monkeypatch):  # which must not matter
        assert not await ids(until=(now - minute).replace(tzinfo=None).isoformat())
        assert len(await ids(until=(now + minute).replace(tzinfo=None).isoformat())) == len(made)


@contextmanager
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has this process live by another clock."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


async def test_csv_holds_the_rows_and_runs_nothing(plane: ControlPlane) -> None:
    headers = await plane.tenant("acme")
    made = entries(40, tenants=("acme",))
    made[0].adapter = '=HYPERLINK("http://evil","x")'
    await settle(plane.services.redis, made)
    as_json = await get(plane, "/v1/usage", headers, group_by=["adapter", "key"])
    by_header = await plane.client.get(
        "/v1/usage?group_by=adapter&group_by=key", headers=headers | {"Accept": "text/csv"}
    )
    assert by_header.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(by_header.text)))
    assert [row["key"] for row in rows] == [row["key"] for row in as_json["data"]]
    assert [int(row["input_tokens"]) for row in rows] == [row["input_tokens"] for row in as_json["data"]]
    assert [row["cost"] for row in rows] == [row["cost"] for row in as_json["data"]]
    assert rows[-1]["adapter"] != made[0].adapter
    assert "'" + made[0].adapter in {row["adapter"] for row in rows}
    one = await plane.client.get("/v1/usage/requests?format=csv&limit=3", headers=headers)
    assert len(list(csv.DictReader(io.StringIO(one.text)))) == 3
    rest = await get(plane, "/v1/usage/requests", headers, cursor=one.headers["x-next-cursor"], limit=1000)
    assert len(rest["data"]) == 37


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_cell_begins_as_a_formula_does(start: str) -> None:
    [_, row] = csv.reader(io.StringIO(to_csv(("name", "tokens"), [(start + "cmd", -1)]), newline=""))
    assert row == ["'" + start + "cmd", "-1"]


@pytest.mark.parametrize(
    ("amount", "text"),
    [("0", "0.00"), ("1E+3", "1000.00"), ("0.5", "0.50"), ("0.1200034", "0.1200034"), ("2E-7", "0.0000002")],
)
def test_amounts_are_plain_digits(amount: str, text: str) -> None:
    assert plain(Decimal(amount)) == text
