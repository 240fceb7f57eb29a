"""What a tenant may have and do: limits that the operator sets, its own admin's reach, what goes with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.batch import Batch
from gateway.batches.files import new_file
from gateway.limits import RateLimits, TenantLimits
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane


@pytest.fixture
async def plane(valkey_url: str, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with control_plane(valkey_url, tmp_path) as plane:
        yield plane


async def refusal(plane: ControlPlane, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """The status and code of a refusal."""
    answer = await plane.client.request(method, path, json=body, headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("code")


async def change(plane: ControlPlane, headers: dict[str, str], changes: dict[str, Any]) -> None:
    """Changes tenant acme, and waits until its key's caller is another than before."""
    find = plane.services.authenticator.authenticate
    before = await find(headers["Authorization"])
    assert (await plane.admin("PATCH", "/tenants/acme", changes)).status_code == 200
    async with asyncio.timeout(60):
        while await find(headers["Authorization"]) == before:
            await asyncio.sleep(0.01)


async def test_limits_are_set_one_by_one_and_unset_by_null(plane: ControlPlane) -> None:
    limits = {"requests_per_minute": 5, "adapter_bytes": 0}
    await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme", "limits": limits})
    shown = (await plane.admin("PATCH", "/tenants/acme", {"limits": {"adapters": 3}})).json()
    assert {name: value for name, value in shown["limits"].items() if value is not None} == limits | {
        "adapters": 3
    }
    shown = (await plane.admin("PATCH", "/tenants/acme", {"limits": {"adapter_bytes": None}})).json()
    assert (shown["limits"]["adapter_bytes"], shown["limits"]["requests_per_minute"]) == (None, 5)
    by_adapter = {
        "sql": {"requests_per_minute": 2, "concurrent_requests": 1},
        "other/json": {"concurrent_requests": 4},
    }
    await plane.admin("PATCH", "/tenants/acme", {"adapter_limits": by_adapter})
    body = {"adapter_limits": {"sql": {"requests_per_minute": None}, "other/json": None}, "weight": 2}
    shown = (await plane.admin("PATCH", "/tenants/acme", body)).json()
    assert list(shown["adapter_limits"]) == ["sql"] and shown["weight"] == 2
    assert shown["adapter_limits"]["sql"] == dict.fromkeys(shown["adapter_limits"]["sql"]) | {
        "concurrent_requests": 1
    }
    assert (await plane.admin("GET", "/tenants/acme")).json() == shown
    cleared = {"limits": None, "adapter_limits": None, "base_models": ["base"]}
    shown = (await plane.admin("PATCH", "/tenants/acme", cleared)).json()
    assert set(shown["limits"].values()) == {None} and shown["adapter_limits"] == {}
    assert shown["base_models"] == ["base"]
    assert (await plane.admin("PATCH", "/tenants/acme", {"base_models": None})).json()["base_models"] is None


NO_LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
    ({"limits": {"adapters": 1.5}}, "limits.adapters"),
    ({"limits": {"tokens_per_month": 10**14}}, "limits.tokens_per_month"),
    ({"limits": {"rpm": 5}}, "limits.rpm"),
    ({"adapter_limits": {"sql": {"adapters": 1}}}, "adapter_limits.sql.adapters"),
    ({"adapter_limits": {"SQL": {"requests_per_minute": 1}}}, "adapter_limits.SQL.[key]"),
    ({"adapter_limits": {f"a{n}": {"requests_per_minute": 1} for n in range(1001)}}, "adapter_limits"),
    ({"weight": None}, "weight"),
    ({"base_models": [""]}, "base_models[0]"),
]


async def test_what_is_no_limit_is_refused_by_field(plane: ControlPlane) -> None:
    created = await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
    for body, param in NO_LIMITS:
        answer = await plane.admin("PATCH", "/tenants/acme", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await plane.admin("GET", "/tenants/acme")).json() == created.json()


async def test_no_more_than_a_thousand_adapters_have_limits_of_their_own(plane: ControlPlane) -> None:
    await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
    for start, status in ((0, 200), (600, 400)):
        some = {f"a{n}": {"requests_per_minute": 1} for n in range(start, start + 600)}
        assert (await plane.admin("PATCH", "/tenants/acme", {"adapter_limits": some})).status_code == status


async def test_limits_reach_every_gateway_with_the_key(
    plane: ControlPlane, valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path / "other") as elsewhere:
        await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
        made = await plane.admin("POST", "/tenants/acme/keys", {"limits": {"requests_per_minute": 3}})
        header = f"Bearer {made.json()['key']}"
        await asyncio.sleep(0.1)
        caller = await elsewhere.services.authenticator.authenticate(header)
        assert (caller.limits, caller.key_limits) == (TenantLimits(), RateLimits(requests_per_minute=3))
        changes = {
            "limits": {"adapters": 1},
            "adapter_limits": {"sql": {"concurrent_requests": 2}},
            "base_models": ["b"],
        }
        await plane.admin("PATCH", "/tenants/acme", changes)
        async with asyncio.timeout(60):
            while caller.limits != TenantLimits(adapters=1):
                await asyncio.sleep(0.01)
                caller = await elsewhere.services.authenticator.authenticate(header)
        assert caller.adapter_limits == {"sql": RateLimits(concurrent_requests=2)}
        assert caller.base_models == {"b"}


async def test_a_tenants_admin_rules_its_keys_and_nothing_else(plane: ControlPlane) -> None:
    acme, other = await plane.tenant("acme", "admin"), await plane.tenant("other")
    call = plane.client.request
    made = await call("POST", "/admin/tenants/acme/keys", json={"scopes": ["inference"]}, headers=acme)
    assert made.status_code == 201
    path = f"/admin/tenants/acme/keys/{made.json()['id']}"
    rotated = await call("POST", f"{path}/rotate", headers=acme)
    assert rotated.status_code == 201
    assert (await call("GET", "/admin/tenants/acme/keys", headers=acme)).status_code == 200
    assert (await call("GET", "/admin/tenants/acme", headers=acme)).json()["id"] == "acme"
    path = f"/admin/tenants/acme/keys/{rotated.json()['id']}"
    assert (await call("DELETE", path, headers=acme)).status_code == 200
    for method, path, body in [
        ("GET", "/admin/tenants", None),
        ("POST", "/admin/tenants", {"name": "Mine"}),
        ("PATCH", "/admin/tenants/acme", {"weight": 1000}),
        ("PATCH", "/admin/tenants/other", {"suspended": True}),
        ("DELETE", "/admin/tenants/acme", None),
        ("DELETE", "/admin/tenants/other", None),
    ]:
        assert await refusal(plane, method, path, body, **acme) == (403, "operator_only")
    theirs = (await plane.admin("GET", "/tenants/other/keys")).json()["data"][0]["id"]
    for method, path, body in [
        ("GET", "/admin/tenants/{}", None),
        ("GET", "/admin/tenants/{}/keys", None),
        ("POST", "/admin/tenants/{}/keys", {"scopes": ["inference"]}),
        ("POST", f"/admin/tenants/{{}}/keys/{theirs}/rotate", None),
        ("DELETE", f"/admin/tenants/{{}}/keys/{theirs}", None),
    ]:
        answers = [
            await call(method, path.format(tenant), json=body, headers=acme) for tenant in ("other", "nobody")
        ]
        assert answers[0].status_code == 404
        assert answers[0].text.replace("other", "nobody") == answers[1].text, "who else is here is not said"
    assert (await plane.client.get("/v1/adapters", headers=other)).status_code == 200


async def test_a_rotated_key_goes_on_for_the_grace_and_the_new_one_at_once(plane: ControlPlane) -> None:
    await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
    body = {"scopes": ["adapters"], "expires_in": 600, "note": "ci", "limits": {"requests_per_minute": 7}}
    old = (await plane.admin("POST", "/tenants/acme/keys", body)).json()
    brief = (await plane.admin("POST", "/tenants/acme/keys", {"expires_in": 1})).json()

    async def rotate(key: dict[str, Any], grace: int) -> dict[str, Any]:
        answer = await plane.admin("POST", f"/tenants/acme/keys/{key['id']}/rotate", {"grace": grace})
        assert answer.status_code == 201
        return answer.json()

    async def status(key: dict[str, Any]) -> int:
        answer = await plane.client.get("/v1/adapters", headers={"Authorization": f"Bearer {key['key']}"})
        return answer.status_code

    assert await status(old) == 200
    rotated_at = int(time.time())
    new = await rotate(old, 300)
    for name in ("scopes", "note", "limits"):
        assert new[name] == old[name]
    assert new["id"] != old["id"]
    assert rotated_at + 599 <= new["expires"] <= time.time() + 601, "its lifetime begins anew"
    assert (await status(old), await status(new)) == (200, 200)
    newest = await rotate(new, 0)
    async with asyncio.timeout(60):
        while await status(new) != 401:
            await asyncio.sleep(0.01)
    assert (await status(old), await status(newest)) == (200, 200)
    listed = {key["id"]: key for key in (await plane.admin("GET", "/tenants/acme/keys")).json()["data"]}
    assert listed.keys() == {old["id"], newest["id"], brief["id"]}
    assert 0 < old["expires"] - listed[old["id"]]["expires"] <= 300, "it stops after the grace"
    gone = await plane.admin("POST", f"/tenants/acme/keys/{new['id']}/rotate")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "key_not_found")
    async with asyncio.timeout(60):
        while await status(brief) != 401:
            await asyncio.sleep(0.05)
    expired = await plane.admin("POST", f"/tenants/acme/keys/{brief['id']}/rotate")
    assert (expired.status_code, expired.json()["error"]["code"]) == (409, "key_expired")
    await plane.admin("POST", "/tenants", {"id": "other", "name": "Other"})
    foreign = await plane.admin("POST", f"/tenants/other/keys/{newest['id']}/rotate")
    assert foreign.json()["error"]["code"] == "key_not_found" and await status(newest) == 200


async def test_a_grace_never_outlives_the_key(plane: ControlPlane) -> None:
    await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
    old = (await plane.admin("POST", "/tenants/acme/keys", {"expires_in": 60})).json()
    await plane.admin("POST", f"/tenants/acme/keys/{old['id']}/rotate", {"grace": 3600})
    listed = (await plane.admin("GET", "/tenants/acme/keys")).json()["data"]
    assert {key["id"]: key["expires"] for key in listed}[old["id"]] == old["expires"]


async def test_a_dry_run_says_what_goes_with_a_tenant_and_deletes_nothing(plane: ControlPlane) -> None:
    acme, other = await plane.tenant("acme"), await plane.tenant("other")
    await plane.upload(acme, adapter_files(seed=1))
    await plane.upload(acme, adapter_files(seed=2), promote="false")
    await plane.upload(other, adapter_files(seed=3), name="json")
    for headers, path in [
        (acme, "/v1/adapters/sql/pin"),
        (acme, "/v1/adapters/sql/grants/other"),
        (other, "/v1/adapters/json/grants/acme"),
    ]:
        assert (await plane.client.put(path, headers=headers)).status_code == 200
    kept = new_file("acme", "in.jsonl", "batch", 70)
    await plane.services.files.add(kept, most_bytes=None)
    batch = Batch("acme", "batch_1", "key", "/v1/completions", kept.id, "1h", 0, 0)
    await plane.services.batches.create(batch)
    before = (await plane.admin("GET", "/tenants/acme")).json()
    [key] = (await plane.admin("GET", "/tenants/acme/keys")).json()["data"]
    doomed = (await plane.admin("DELETE", "/tenants/acme?dry_run=true")).json()
    used = (await plane.client.get("/v1/adapters", headers=acme)).json()["bytes"]
    assert doomed == {
        "id": "acme",
        "object": "tenant.deletion",
        "deleted": False,
        "keys": [key["id"]],
        "adapters": [{"name": "sql", "versions": [1, 2], "live": 1, "pinned": True, "grants": ["other"]}],
        "bytes": used,
        "files": 1,
        "file_bytes": 70,
        "batches": ["batch_1"],
        "granted": ["other/json"],
    }
    assert (await plane.admin("GET", "/tenants/acme")).json() == before
    assert (await plane.client.get("/v1/adapters", headers=acme)).status_code == 200


async def test_a_quota_is_held_over_http_and_says_limit_use_and_mend(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await plane.upload(acme, adapter_files(seed=1))
    used = (await plane.client.get("/v1/adapters", headers=acme)).json()["bytes"]
    await change(plane, acme, {"limits": {"adapters": 1, "adapter_bytes": used + 1}})
    too_many = await plane.upload(acme, adapter_files(seed=1), name="json")
    too_large = await plane.upload(acme, adapter_files(seed=2))
    for answer, code in ((too_many, "adapter_quota_exceeded"), (too_large, "adapter_bytes_quota_exceeded")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (409, code)
        assert "Delete" in error["message"] and "ask your operator" in error["message"]
    assert f"{used:,} of the {used + 1:,} bytes" in too_large.json()["error"]["message"]
    assert (await plane.upload(acme, adapter_files(seed=1))).status_code == 201, "the same bytes again"
    files = [{"name": "adapter_config.json", "bytes": 1, "sha256": "0" * 64}]
    files.append({"name": "adapter_model.safetensors", "bytes": 10, "sha256": "1" * 64})
    begun = await plane.client.post(
        "/v1/adapter-uploads", json={"name": "json", "files": files}, headers=acme
    )
    assert begun.json()["error"]["code"] == "adapter_quota_exceeded", "before a byte is sent"
    pinned = await plane.client.put("/v1/adapters/sql/pin", headers=acme)
    assert pinned.status_code == 200
    await change(plane, acme, {"limits": None})
    assert (await plane.upload(acme, adapter_files(seed=2))).status_code == 201


async def test_uploads_for_a_base_model_that_the_tenant_may_not_use_are_refused(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await change(plane, acme, {"base_models": ["another"]})
    answer = await plane.upload(acme, adapter_files())
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "base_model_not_allowed")
    assert await refusal(plane, "GET", "/v1/adapter-base", **acme) == (403, "base_model_not_allowed")
    await change(plane, acme, {"base_models": ["another", "base"]})
    assert (await plane.upload(acme, adapter_files())).status_code == 201
