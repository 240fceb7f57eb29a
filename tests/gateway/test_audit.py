"""Who did what: every change leaves one entry, with what differs, and a tenant sees its own alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from redis.asyncio import Redis

from gateway import audit as module
from gateway.api import adapter_aliases, adapter_grants, adapters, pulls, uploads
from gateway.api.audited import ACTIONS
from gateway.audit import AUDIT_STREAM, GATEWAY, Actor, Audit, AuditQuery, Change, differences, trimming
from gateway.keys import Keys
from gateway.tenants import Tenants
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane

OPERATOR = Actor("operator", "", "192.0.2.1")


@pytest.fixture
async def plane(valkey_url: str, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with control_plane(valkey_url, tmp_path) as plane:
        yield plane


async def entries(plane: ControlPlane, query: str = "", headers: dict[str, str] | None = None) -> list[Any]:
    """The audit's entries, the oldest first."""
    if headers is None:
        answer = await plane.admin("GET", f"/audit{query}")
    else:
        answer = await plane.client.get(f"/admin/audit{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][::-1]


async def test_changes_of_tenants_keys_and_limits_are_noted_with_what_differs(plane: ControlPlane) -> None:
    await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme", "limits": {"adapters": 2}})
    limits = {"requests_per_minute": 5, "adapters": None}
    await plane.admin("PATCH", "/tenants/acme", {"weight": 2, "limits": limits})
    await plane.admin("PATCH", "/tenants/acme", {"adapter_limits": {"sql": {"concurrent_requests": 1}}})
    await plane.admin("PATCH", "/tenants/acme", {"weight": 2})  # as it is already
    await plane.admin("PATCH", "/tenants/acme", {"suspended": True})
    await plane.admin("PATCH", "/tenants/acme", {"suspended": False})
    key = (await plane.admin("POST", "/tenants/acme/keys", {"note": "ci"})).json()
    new = (await plane.admin("POST", f"/tenants/acme/keys/{key['id']}/rotate", {"grace": 60})).json()
    await plane.admin("DELETE", f"/tenants/acme/keys/{new['id']}")
    await plane.admin("DELETE", f"/tenants/acme/keys/{new['id']}")  # is not there any more
    found = await entries(plane)
    assert [(entry["action"], entry["target"]) for entry in found] == [
        ("tenant.create", "acme"),
        ("tenant.update", "acme"),
        ("tenant.update", "acme"),
        ("tenant.suspend", "acme"),
        ("tenant.resume", "acme"),
        ("key.create", key["id"]),
        ("key.rotate", key["id"]),
        ("key.revoke", new["id"]),
    ]
    assert (found[0]["before"], found[0]["after"]["limits.adapters"]) == ({}, 2)
    assert found[1]["before"] == {"weight": 1.0, "limits.adapters": 2}
    assert found[1]["after"] == {"weight": 2.0, "limits.requests_per_minute": 5}
    assert found[2]["after"] == {"adapter_limits.sql.concurrent_requests": 1}
    assert found[6]["after"]["replaced_by"] == new["id"]
    assert found[7]["before"]["note"] == "ci" and found[7]["after"] == {}
    for entry in found:
        assert (entry["by"], entry["key"], entry["address"]) == ("operator", "operator", "127.0.0.1")
        assert entry["tenant"] == "acme" and abs(entry["at"] - time.time()) < 600
    raw = str(await plane.services.redis.xrange(AUDIT_STREAM))
    records = await plane.services.keys.of_tenant("acme")
    for secret in (key["key"], new["key"], *(record.digest.hex() for record in records)):
        assert secret.split("_", 2)[-1] not in raw


async def test_a_change_that_is_not_made_is_not_noted(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await plane.upload(acme, adapter_files())
    before = await entries(plane)
    await plane.admin("POST", "/tenants", {"id": "acme", "name": "Impostor"})
    await plane.admin("PATCH", "/tenants/nobody", {"weight": 2})
    await plane.admin("DELETE", "/tenants/acme?dry_run=true")
    await plane.client.post("/v1/adapters/sql/promote", json={"version": 9}, headers=acme)
    await plane.client.delete("/v1/adapters/nope", headers=acme)
    await plane.upload(acme, {"adapter_config.json": b"{}"})
    assert await entries(plane) == before


async def test_changes_of_adapters_are_noted_by_whoever_made_them(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    other = await plane.tenant("other", "adapters", "admin")
    await plane.upload(acme, adapter_files(seed=1))
    await plane.upload(acme, adapter_files(seed=2), promote="false")
    url = "/v1/adapters/sql"
    calls = [
        ("PUT", f"{url}/canary", {"version": 2, "percent": 10}),
        ("DELETE", f"{url}/canary", None),
        ("POST", f"{url}/promote", {"version": 2}),
        ("POST", f"{url}/rollback", None),
        ("PUT", f"{url}/pin", None),
        ("DELETE", f"{url}/pin", None),
        ("PUT", f"{url}/grants/other", None),
        ("DELETE", f"{url}/grants/other", None),
        ("POST", f"{url}/rename", {"name": "query"}),
        ("DELETE", "/v1/adapters/query@2", None),
        ("DELETE", "/v1/adapters/query", None),
    ]
    for method, path, body in calls:
        answer = await plane.client.request(method, path, json=body, headers=acme)
        assert answer.status_code == 200, answer.text
    found = await entries(plane, "?action=adapter.")
    assert [
        (entry["action"][8:], entry["target"], entry["before"], entry["after"]) for entry in found[2:]
    ] == [
        ("canary", "sql", {"canary": None}, {"canary": "2: 10 %"}),
        ("canary_off", "sql", {"canary": "2: 10 %"}, {"canary": None}),
        ("promote", "sql", {"live": 1}, {"live": 2}),
        ("rollback", "sql", {"live": 2}, {"live": 1}),
        ("pin", "sql", {"pinned": False}, {"pinned": True}),
        ("unpin", "sql", {"pinned": True}, {"pinned": False}),
        ("grant", "sql", {"grants": []}, {"grants": ["other"]}),
        ("revoke", "sql", {"grants": ["other"]}, {"grants": []}),
        ("rename", "sql", {"name": "sql"}, {"name": "query"}),
        ("delete", "query", {"versions": [1, 2]}, {"versions": [1]}),
        ("delete", "query", found[-1]["before"], {}),
    ]
    assert [entry["after"]["version"] for entry in found[:2]] == [1, 2]
    assert {(entry["tenant"], entry["by"]) for entry in found} == {("acme", "acme")}
    assert await entries(plane, "?action=adapter.", other) == [], "a grant is its giver's business"


async def test_a_tenants_admin_reads_its_own_tenants_entries_alone(plane: ControlPlane) -> None:
    acme, other = await plane.tenant("acme", "admin"), await plane.tenant("other", "admin")
    mine = await plane.client.post("/admin/tenants/acme/keys", json={}, headers=acme)
    found = await entries(plane, headers=acme)
    assert {entry["tenant"] for entry in found} == {"acme"} and len(found) == 3
    assert found[-1]["target"] == mine.json()["id"]
    assert [entry["by"] for entry in found] == ["operator", "operator", "acme"]
    assert [entry["address"] for entry in found] == [None, None, "127.0.0.1"]
    assert found == await entries(plane, "?tenant=acme", acme)
    refused = await plane.client.get("/admin/audit?tenant=acme", headers=other)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_only")


async def test_pages_join_to_the_whole_and_times_bound_it(plane: ControlPlane) -> None:
    for n in range(5):
        await plane.services.audit.append(Change("key.create", "acme", f"{n}", {}, {}), OPERATOR)
        await asyncio.sleep(0.002)
    whole = (await plane.admin("GET", "/audit")).json()
    assert [entry["target"] for entry in whole["data"]] == ["4", "3", "2", "1", "0"] and not whole["next"]
    cursor, joined = "", []
    while cursor is not None:
        page = (await plane.admin("GET", f"/audit?limit=2{cursor and '&cursor=' + cursor}")).json()
        joined += page["data"]
        cursor = page["next"]
    assert joined == whole["data"]
    since, until = whole["data"][3]["at"], whole["data"][1]["at"]
    bounded = (await plane.admin("GET", f"/audit?since={since}&until={until}")).json()["data"]
    assert [entry["target"] for entry in bounded] == ["3", "2", "1"]
    for query in ("cursor=x", "limit=0", "since=NaN", "since=-1"):
        assert (await plane.admin("GET", f"/audit?{query}")).status_code == 400


async def test_a_rare_entry_is_found_page_by_page(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 10)
    monkeypatch.setattr(module, "_MOST_READ", 30)
    async with Redis.from_url(valkey_url) as redis:
        audit = Audit(redis)
        for n in range(100):
            await audit.append(
                Change("tenant.update", "acme" if n == 3 else "other", str(n), {}, {}), OPERATOR
            )
        query, pages = AuditQuery(tenant_id="acme"), []
        while not pages or pages[-1].next:
            before = pages[-1].next if pages else None
            pages.append(await audit.page(AuditQuery(tenant_id="acme", before_id=before)))
        assert query.takes(pages[-1].entries[-1].change)
        assert [len(page.entries) for page in pages] == [0, 0, 0, 1]


async def test_entries_go_when_they_are_old_and_not_before(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Redis.from_url(valkey_url) as redis:
        day_ms, now_ms = 86_400_000, int(time.time() * 1000)
        for age in (3, 2):
            fields = {"action": "key.create", "tenant": "acme", "object": str(age), "key": "operator"}
            fields |= {"by": "", "address": "", "before": "{}", "after": "{}"}
            await redis.xadd(AUDIT_STREAM, fields, id=f"{now_ms - age * day_ms}-0")  # type: ignore[arg-type]
        audit = Audit(redis)
        async with trimming(audit, None):
            await asyncio.sleep(0.05)
        assert len((await audit.page(AuditQuery())).entries) == 2
        monkeypatch.setattr(
            time, "time", lambda: now_ms / 1000 + 30 * 86_400
        )  # this gateway's clock is wrong
        async with trimming(audit, 3), asyncio.timeout(60):
            while len((await audit.page(AuditQuery())).entries) > 1:
                await asyncio.sleep(0.01)
        assert [entry.change.object for entry in (await audit.page(AuditQuery())).entries] == ["2"]


async def test_many_changes_of_a_tenant_at_once_are_all_made_and_noted_in_their_order(
    valkey_url: str,
) -> None:
    async with Redis.from_url(valkey_url) as here, Redis.from_url(valkey_url) as there:
        await Tenants(here).create("Acme", tenant_id="acme")
        names = ("requests_per_minute", "adapters", "tokens_per_month", "concurrent_requests")
        await asyncio.gather(
            *(
                Tenants(here if n % 2 else there).update(
                    "acme", {"limits": {names[n % 4]: n + 1}}, by=OPERATOR
                )
                for n in range(24)
            )
        )
        tenant = await Tenants(here).get("acme")
        assert tenant is not None and set(tenant.limits.that_are_set()) == set(names)
        replayed: dict[str, Any] = {}
        page = await Audit(here).page(AuditQuery(action="tenant.update"))
        for entry in reversed(page.entries):
            assert entry.change.before == {k: v for k, v in replayed.items() if k in entry.change.before}
            replayed |= entry.change.after
        assert replayed == {f"limits.{name}": value for name, value in tenant.limits.that_are_set().items()}


async def test_what_the_gateway_does_itself_says_so(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as redis:
        await Keys(redis).create_operator()
        await Keys(redis).create_operator()
        [entry] = (await Audit(redis).page(AuditQuery())).entries
        assert (entry.change.action, entry.change.object, entry.actor) == ("key.create", "operator", GATEWAY)


def test_every_endpoint_that_may_change_an_adapter_is_noted() -> None:
    changes_nothing = {"append_to_upload", "give_up_upload"}
    names = {
        route.name
        for part in (adapter_aliases, adapter_grants, adapters, pulls, uploads)
        for route in part.router.routes
        if isinstance(route, APIRoute) and route.methods != {"GET"}
    }
    assert names == ACTIONS.keys() | changes_nothing


def test_only_what_differs_is_kept() -> None:
    before = {"weight": 1.0, "limits": {"adapters": 1, "adapter_bytes": 2}, "name": "a"}
    after = {"weight": 1.0, "limits": {"adapters": 3}, "name": "a", "note": ""}
    assert differences(before, after) == (
        {"limits.adapters": 1, "limits.adapter_bytes": 2},
        {"limits.adapters": 3, "note": ""},
    )
