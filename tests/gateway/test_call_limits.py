"""What holds for calls that generate nothing: management, tokenisation, and what quotas refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from adapters.registry import AdapterVersion
from gateway.accounts.admission import Admissions
from gateway.accounts.calls import CallLimit, CallLimits, tokenization_calls
from gateway.accounts.moves import move_use_of_adapter
from gateway.accounts.windows import root_of
from gateway.api import counted
from gateway.audit import AUDIT_STREAM
from gateway.auth import Principal
from gateway.errors import ApiError
from gateway.redis_client import connect
from gateway.redis_health import RedisHealth
from gateway.resolve import ResolvedModel
from protos.engine_pb2 import ModelInfo, Submit
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane

FEW = CallLimit("few", "calls", 3, 60_000)
FEW_MORE = CallLimit("few_more", "calls", 3, 60_000)


@pytest.fixture
async def plane(valkey_url: str, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with control_plane(valkey_url, tmp_path) as plane:
        yield plane


def rejections(plane: ControlPlane) -> list[str]:
    text = plane.services.metrics.render().decode()
    return [line for line in text.splitlines() if line.startswith("loraplex_limit_rejections_total{")]


async def test_management_calls_of_a_tenant_are_counted_and_the_operators_are_not(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "MANAGEMENT", FEW)
    acme, other = await plane.tenant("acme", "adapters", "admin"), await plane.tenant("other")
    paths = ("/v1/adapters", "/admin/tenants/acme", "/v1/adapters/sql/diff?from=1&to=2")
    for path in paths:
        assert (await plane.client.get(path, headers=acme)).status_code in (200, 404)
    for path in paths:
        refused = await plane.client.get(path, headers=acme)
        assert (refused.status_code, refused.json()["error"]["param"]) == (429, "few")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert (await plane.client.get("/v1/adapters", headers=other)).status_code == 200
    for _ in range(5):
        assert (await plane.admin("GET", "/tenants/acme")).status_code == 200
    assert rejections(plane) == ['loraplex_limit_rejections_total{limit="few"} 3.0']


async def test_changes_are_counted_by_the_day_and_refused_before_they_are_made(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "CHANGES", FEW)
    acme = await plane.tenant("acme")
    assert (await plane.upload(acme, adapter_files())).status_code == 201
    for change in ("PUT", "DELETE"):
        assert (await plane.client.request(change, "/v1/adapters/sql/pin", headers=acme)).status_code == 200
    noted = await plane.services.redis.xlen(AUDIT_STREAM)
    refused = await plane.client.put("/v1/adapters/sql/pin", headers=acme)
    assert refused.status_code == 429
    assert await plane.services.redis.xlen(AUDIT_STREAM) == noted
    shown = (await plane.client.get("/v1/adapters/sql", headers=acme)).json()
    assert not shown["pinned"]


async def test_a_key_that_infers_cannot_keep_its_tenant_from_revoking_it(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "FILE_CALLS", FEW)
    for name in ("MANAGEMENT", "CHANGES"):
        monkeypatch.setattr(counted, name, FEW_MORE)
    acme = await plane.tenant("acme", "inference", "adapters", "admin")
    answers = [await plane.client.post("/v1/files", headers=acme) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [415, 415, 415, 429]
    assert (await plane.client.get("/v1/batches", headers=acme)).status_code == 429
    assert (await plane.client.delete("/admin/tenants/acme/keys/none", headers=acme)).status_code == 404


async def test_any_number_of_gateways_count_as_one_until_the_window_ends(valkey_url: str) -> None:
    refused: list[tuple[str, str, str]] = []
    short = CallLimit("short", "calls", 4, 1000)
    async with connect(valkey_url) as redis, connect(valkey_url) as another:
        gateways = [
            CallLimits(each, RedisHealth(each), lambda *why: refused.append(why)) for each in (redis, another)
        ]
        calls = [gateways[number % 2].take("acme", (FEW, short)) for number in range(10)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [end for end in ended if end is None] == [None] * 3
        assert all(isinstance(end, ApiError) and end.status == 429 for end in ended if end is not None)
        assert refused == [("acme", "", "few")] * 7
        with pytest.raises(ApiError, match="calls"):
            for number in range(100):  # a slow machine may need more than one window
                await gateways[number % 2].take("acme", (short,))
        await asyncio.sleep(1.01)
        await gateways[1].take("acme", (short,), amount=4)


async def test_what_is_counted_of_calls_is_kept_until_the_longest_window_ends(valkey_url: str) -> None:
    by_the_day = CallLimit("by_the_day", "calls", 3, 86_400_000)
    async with connect(valkey_url) as redis:
        limits = CallLimits(redis, RedisHealth(redis), lambda *why: pytest.fail("nothing is refused"))
        await limits.take("acme", (FEW,))
        assert 0 < await redis.pttl(f"{root_of('acme')}:window:calls") <= FEW.window_ms
        await limits.take("acme", (by_the_day,))
        await limits.take("acme", (FEW,))
        assert await redis.pttl(f"{root_of('acme')}:window:calls") > FEW.window_ms


async def test_while_redis_is_away_calls_are_let_through_and_only_the_first_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connect("redis://127.0.0.1:1/0") as nowhere:
        limits = CallLimits(nowhere, RedisHealth(nowhere), lambda *why: pytest.fail("nothing is refused"))
        await limits.take("acme", (FEW,))
        monkeypatch.setattr(limits, "_take", lambda **_: pytest.fail("a call waits for Redis"))
        for _ in range(5):
            await limits.take("acme", (FEW,))


def test_a_long_body_counts_as_several_calls() -> None:
    assert [tokenization_calls(size) for size in (0, 1, 4096, 4097, 8 << 20)] == [1, 1, 1, 2, 2048]


async def test_what_quotas_refuse_is_counted_with_the_rejections(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await plane.admin("PATCH", "/tenants/acme", {"max_pinned_adapters": 0, "limits": {"adapters": 1}})
    assert (await plane.upload(acme, adapter_files())).status_code == 201
    while (await plane.upload(acme, adapter_files(seed=1), name="json")).status_code != 409:
        await plane.client.delete("/v1/adapters/json", headers=acme)  # the limit takes a moment
    assert (await plane.client.put("/v1/adapters/sql/pin", headers=acme)).status_code == 409
    assert sorted(rejections(plane)) == [
        'loraplex_limit_rejections_total{limit="adapters"} 1.0',
        'loraplex_limit_rejections_total{limit="max_pinned_adapters"} 1.0',
    ]


async def test_a_limit_follows_its_adapter_to_another_name(plane: ControlPlane) -> None:
    """Both the limit and what is used of it; else a name that is new every second would have no limit."""
    acme = await plane.tenant("acme")
    await plane.upload(acme, adapter_files())
    by_adapter = {
        "sql": {"requests_per_minute": 2, "concurrent_requests": 9},
        "query": {"requests_per_minute": 7, "concurrent_requests": 5},
    }
    await plane.admin("PATCH", "/tenants/acme", {"adapter_limits": by_adapter})
    find = plane.services.authenticator.authenticate
    while not (await find(acme["Authorization"])).adapter_limits:
        await asyncio.sleep(0.01)
    gate = Admissions(
        plane.services.redis, RedisHealth(plane.services.redis), lease_ms=60_000, on_refusal=lambda *why: None
    )
    for number in range(2):
        await admit(gate, await find(acme["Authorization"]), "sql", number)
    renamed = await plane.client.post("/v1/adapters/sql/rename", headers=acme, json={"name": "query"})
    assert renamed.status_code == 200
    tenant = await plane.services.tenants.get("acme")
    assert tenant is not None and list(tenant.adapter_limits) == ["query"]
    lower = {"requests_per_minute": 2, "concurrent_requests": 5}
    assert tenant.adapter_limits["query"].that_are_set() == lower
    while "sql" in (await find(acme["Authorization"])).adapter_limits:
        await asyncio.sleep(0.01)
    with pytest.raises(ApiError, match="the adapter 'query'") as caught:
        await admit(gate, await find(acme["Authorization"]), "query", 3)
    assert caught.value.param == "requests_per_minute"


async def test_who_ran_when_a_name_changed_is_forgotten_with_its_lease(plane: ControlPlane) -> None:
    """Or each request that runs while its adapter is renamed would stay in Redis for ever."""
    redis = plane.services.redis
    old, new = (f"{root_of('acme')}:leases:adapter:{name}" for name in ("sql", "query"))
    await redis.zadd(old, {"ended": 1, "runs": 1 << 50})
    await move_use_of_adapter(redis, "acme", "sql", "query")
    assert await redis.zrange(new, 0, -1) == [b"runs"]
    assert not await redis.exists(old)


async def admit(gate: Admissions, who: Principal, adapter: str, number: int) -> None:
    version = AdapterVersion("acme", adapter, 1, b"\1" * 32, 8, 4, ("q_proj",), None, 0)
    await gate.admit(
        who,
        ResolvedModel(f"{adapter}@1", ModelInfo(), version),
        [Submit(prompt_tokens=[1], seeds=[1], max_tokens=1)],
        request_id=f"r{number}",
        arrived_at=0.0,
        route="chat",
        open_ended=False,
    )


async def test_a_deleted_tenants_id_is_not_given_again(plane: ControlPlane) -> None:
    await plane.tenant("acme")
    assert (await plane.admin("DELETE", "/tenants/acme")).json()["deleted"]
    refused: httpx.Response = await plane.admin("POST", "/tenants", {"id": "acme", "name": "Another"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "tenant_retired")
    made = (await plane.admin("POST", "/tenants", {"name": "Acme"})).json()
    assert made["id"].startswith("t-"), "nor where it follows from the name"
