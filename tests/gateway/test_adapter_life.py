"""Versions, aliases and grants over HTTP: what changes, what is refused, and with which words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.folder_store import FolderStore
from adapters.registry import Registry
from adapters.registry.desired import desired_adapters
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane

Headers = Mapping[str, str]


@pytest.fixture
async def plane(valkey_url: str, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with control_plane(valkey_url, tmp_path) as plane:
        yield plane


async def call(
    plane: ControlPlane, headers: Headers, method: str, path: str, body: Mapping[str, Any] | None = None
) -> httpx.Response:
    return await plane.client.request(method, f"/v1/adapters/{path}", headers=headers, json=body)


async def done(
    plane: ControlPlane, headers: Headers, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    answer = await call(plane, headers, method, path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def error(
    plane: ControlPlane, headers: Headers, method: str, path: str, body: Mapping[str, Any] | None = None
) -> tuple[int, str]:
    """Asserts a refusal in OpenAI's shape; returns its status and code."""
    answer = await call(plane, headers, method, path, body)
    problem = answer.json()["error"]
    assert set(problem) == {"message", "type", "param", "code"} and problem["message"].endswith(".")
    return answer.status_code, problem["code"]


async def upload(plane: ControlPlane, headers: Headers, seed: int, **fields: str) -> dict[str, Any]:
    answer = await plane.upload(headers, adapter_files(seed=seed), **fields)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_staged_upload_waits_for_its_promotion(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await upload(plane, acme, 1)
    staged = await upload(plane, acme, 2, promote="false")
    assert staged["id"] == "sql@2"
    shown = await done(plane, acme, "GET", "sql")
    assert (shown["id"], shown["live"], len(shown["versions"])) == ("sql@1", 1, 2)
    promoted = await done(plane, acme, "POST", "sql/promote", {"version": 2})
    assert (promoted["id"], promoted["live"]) == ("sql@2", 2)
    back = await done(plane, acme, "POST", "sql/rollback")
    assert (back["id"], back["live"]) == ("sql@1", 1)
    assert await error(plane, acme, "POST", "sql/rollback") == (409, "nothing_to_roll_back")
    newest = await done(plane, acme, "POST", "sql/promote")
    assert newest["live"] == 2
    answer = await plane.upload(acme, adapter_files(seed=3), promote="maybe")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "promote")


async def test_a_name_of_which_nothing_is_live(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await upload(plane, acme, 1, promote="false")
    [listed] = (await plane.client.get("/v1/adapters", headers=acme)).json()["data"]
    assert (listed["id"], listed["live"]) == ("sql@1", None)
    assert await error(plane, acme, "PUT", "sql/pin") == (409, "no_live_version")
    body = {"version": 1, "percent": 5}
    assert await error(plane, acme, "PUT", "sql/canary", body) == (409, "no_live_version")


async def test_a_canary_begins_and_ends(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await upload(plane, acme, 1)
    await upload(plane, acme, 2, promote="false")
    begun = await done(plane, acme, "PUT", "sql/canary", {"version": 2, "percent": 12.5})
    assert (begun["live"], begun["canary"]) == (1, {"version": 2, "percent": 12.5})
    assert (await done(plane, acme, "GET", "sql"))["canary"] == begun["canary"]
    assert (await done(plane, acme, "DELETE", "sql/canary"))["canary"] is None
    await done(plane, acme, "PUT", "sql/canary", {"version": 2, "percent": 100})
    ended = await done(plane, acme, "POST", "sql/promote")
    assert (ended["live"], ended["canary"]) == (2, None)
    for body, param in (
        ({"version": 1}, "percent"),
        ({"percent": 5}, "version"),
        ({"version": 1, "percent": 0}, "percent"),
        ({"version": 1, "percent": 100.5}, "percent"),
        ({"version": "1", "percent": 5}, "version"),
        ({"version": 1, "percent": 5, "user": "x"}, "user"),
    ):
        answer = await call(plane, acme, "PUT", "sql/canary", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert await error(plane, acme, "PUT", "sql/canary", {"version": 2, "percent": 5}) == (
        409,
        "version_is_live",
    )


async def test_one_version_is_deleted_and_its_bytes_go(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    first, second = await upload(plane, acme, 1), await upload(plane, acme, 2)
    answer = await call(plane, acme, "DELETE", "sql@2")
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == (
        "sql@2 is the live version of 'sql'. Promote another version first, or delete all of 'sql'."
    )
    gone = await done(plane, acme, "DELETE", "sql@1")
    assert gone == {"id": "sql@1", "object": "adapter.deleted", "deleted": True}
    assert plane.engines.unloaded == [bytes.fromhex(first["digest"])]
    listed = (await plane.client.get("/v1/adapters", headers=acme)).json()
    assert listed["bytes"] == second["bytes"]
    assert await error(plane, acme, "DELETE", "sql@1") == (404, "adapter_not_found")
    assert plane.blobs() == sorted([first["digest"], second["digest"]]), "it stays for its grace"
    await plane.collect()
    assert plane.blobs() == [second["digest"]]
    assert (await upload(plane, acme, 3))["id"] == "sql@3"


async def test_pins_reach_engines_and_have_a_quota(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await plane.admin("PATCH", "/tenants/acme", {"max_pinned_adapters": 1})
    first = await upload(plane, acme, 1, name="a")
    await upload(plane, acme, 2, name="b")
    assert (await done(plane, acme, "PUT", "a/pin"))["pinned"] is True
    assert (await desired_adapters(plane.services.redis, [])).pinned == {bytes.fromhex(first["digest"])}
    answer = await call(plane, acme, "PUT", "b/pin")
    assert answer.status_code == 409 and "has pinned 1 adapters" in answer.json()["error"]["message"]
    assert (await done(plane, acme, "DELETE", "a/pin"))["pinned"] is False
    assert (await done(plane, acme, "PUT", "b/pin"))["pinned"] is True
    more: dict[str, Any] = {"max_pinned_adapters": 5, "limits": {"pinned_pages": 1}}
    await plane.admin("PATCH", "/tenants/acme", more)
    answer = await call(plane, acme, "PUT", "a/pin")
    problem = answer.json()["error"]
    assert (answer.status_code, problem["code"]) == (409, "pinned_pages_quota_exceeded")
    assert "take 1 of 1 rank pages" in problem["message"]
    await plane.admin("PATCH", "/tenants/acme", {"limits": {"pinned_pages": 2}})
    assert (await done(plane, acme, "PUT", "a/pin"))["pinned"] is True


async def test_a_rename(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await upload(plane, acme, 1, name="old")
    await upload(plane, acme, 2, name="other")
    renamed = await done(plane, acme, "POST", "old/rename", {"name": "new"})
    assert renamed["id"] == "new@1"
    assert await error(plane, acme, "GET", "old") == (404, "adapter_not_found")
    assert await error(plane, acme, "POST", "new/rename", {"name": "other"}) == (409, "name_taken")
    assert await error(plane, acme, "POST", "new/rename", {"name": "a/b"}) == (400, "invalid_name")
    assert await error(plane, acme, "POST", "new/rename", {"name": "base"}) == (400, "invalid_name")
    assert (await done(plane, acme, "POST", "new/rename", {"name": "old"}))["id"] == "old@1"


async def test_history_names_the_key(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    key_id = acme["Authorization"].split("_")[1]
    await upload(plane, acme, 1)
    await upload(plane, acme, 2)
    await done(plane, acme, "POST", "sql/rollback")
    await done(plane, acme, "PUT", "sql/grants/globex")
    events = (await done(plane, acme, "GET", "sql/history"))["data"]
    assert [(event["action"], event["version"], event["detail"]) for event in events] == [
        ("grant", None, "globex"),
        ("rollback", 1, ""),
        ("upload", 2, "live"),
        ("upload", 1, "live"),
    ]
    assert {event["by"] for event in events} == {key_id}


def _without_volatile(answer: httpx.Response) -> tuple[int, bytes, dict[str, str]]:
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    return answer.status_code, answer.content, headers


async def test_each_route_answers_for_anothers_adapter_as_for_none(plane: ControlPlane) -> None:
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    await upload(plane, acme, 1, name="theirs")
    await upload(plane, acme, 2, name="theirs")
    await done(plane, acme, "PUT", "theirs/grants/globex")
    for method, path, body in (
        ("GET", "{}", None),
        ("DELETE", "{}", None),
        ("DELETE", "{}@1", None),
        ("POST", "{}/promote", None),
        ("POST", "{}/promote", {"version": 1}),
        ("POST", "{}/rollback", None),
        ("PUT", "{}/canary", {"version": 1, "percent": 5}),
        ("DELETE", "{}/canary", None),
        ("PUT", "{}/pin", None),
        ("DELETE", "{}/pin", None),
        ("POST", "{}/rename", {"name": "mine"}),
        ("GET", "{}/history", None),
        ("PUT", "{}/grants/initech", None),
        ("DELETE", "{}/grants/globex", None),
        ("GET", "{}/diff?from=1&to=2", None),
        ("GET", "{}/files", None),
        ("GET", "{}@1/files/adapter_config.json", None),
    ):
        theirs, nobodys = [
            _without_volatile(await call(plane, globex, method, path.format(name), body))
            for name in ("theirs", "nobody")
        ]
        assert theirs[0] == 404, (method, path)
        assert (theirs[0], theirs[1].replace(b"theirs", b"nobody"), theirs[2]) == nobodys, (method, path)
    assert (await done(plane, acme, "GET", "theirs"))["live"] == 2


async def test_what_can_be_no_name_is_not_found(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await upload(plane, acme, 1)
    for path in ("SQL", "sql@0", "sql@x", "sql@live", "sql@9/files", "sql@1/promote", "sql@1/pin"):
        method = "GET" if path.count("/") == 0 or "files" in path else "POST"
        method = "PUT" if path.endswith("pin") else method
        assert await error(plane, acme, method, path) == (404, "adapter_not_found"), path
    assert await error(plane, acme, "PUT", "sql/grants/acme") == (400, "own_adapter")
    refusal = await call(plane, acme, "PUT", "sql/grants/NO")
    assert refusal.status_code == 400 and "'NO' is no tenant's id" in refusal.json()["error"]["message"]


async def test_uploads_at_once_are_versions_of_their_own(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    made = await asyncio.gather(*(upload(plane, acme, seed) for seed in range(4)))
    assert sorted(item["version"] for item in made) == [1, 2, 3, 4]
    shown = await done(plane, acme, "GET", "sql")
    assert {item["version"]: item["digest"] for item in shown["versions"]} == {
        item["version"]: item["digest"] for item in made
    }
    assert shown["live"] == 4 and len(set(plane.blobs())) == 4


async def test_comparisons_of_a_tenant_are_as_many_as_its_uploads(plane: ControlPlane) -> None:
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    for headers in (acme, globex):
        for seed in (1, 2):
            await upload(plane, headers, seed)
    with ExitStack() as held:
        for _ in range(plane.services.settings.uploads_per_tenant):
            held.enter_context(plane.services.upload_slots.taken("acme"))
        assert await error(plane, acme, "GET", "sql/diff?from=1&to=2") == (429, "too_many_uploads")
        await done(plane, globex, "GET", "sql/diff?from=1&to=2")
    await done(plane, acme, "GET", "sql/diff?from=1&to=2")


async def test_nobody_downloads_words_of_another_tenant(plane: ControlPlane) -> None:
    """Equal weights are one blob only where the files say the same: a config names a base model to load."""
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    for headers, base in ((acme, "/home/acme/secret"), (globex, "globex/model")):
        answer = await plane.upload(headers, adapter_files(seed=1, base_model_name_or_path=base))
        assert answer.status_code == 201, answer.text
    for headers, base in ((acme, "/home/acme/secret"), (globex, "globex/model")):
        config = await done(plane, headers, "GET", "sql@1/files/adapter_config.json")
        assert config["base_model_name_or_path"] == base


async def test_the_store_has_a_record_of_each_change(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    registry: Registry = plane.services.registry
    await upload(plane, acme, 1)
    await upload(plane, acme, 2, promote="false")
    for method, path, body in (
        ("PUT", "sql/canary", {"version": 2, "percent": 5}),
        ("PUT", "sql/pin", None),
        ("PUT", "sql/grants/globex", None),
        ("POST", "sql/promote", None),
        ("POST", "sql/rollback", None),
        ("DELETE", "sql/pin", None),
        ("DELETE", "sql/grants/globex", None),
        ("DELETE", "sql@2", None),
        ("POST", "sql/rename", {"name": "new"}),
        ("DELETE", "new", None),
    ):
        await done(plane, acme, method, path, body)
        assert await registry.records.outdated() == []
        kept = dict(FolderStore(plane.store).list_records("names"))
        for path_of_record, record in kept.items():
            _, tenant, name = path_of_record.split("/")
            assert record == await registry.records.export(tenant, name), (method, path)
    assert set(kept) == {"names/acme/sql", "names/acme/new"}
    await plane.admin("DELETE", "/tenants/acme")
    assert dict(FolderStore(plane.store).list_records("names")) == {}


async def test_a_record_that_cannot_be_written_is_written_later(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from adapters import lifecycle

    def full(self: object, path: str, record: object) -> None:
        raise OSError(28, "No space left on device")

    acme = await plane.tenant("acme")
    await upload(plane, acme, 1)
    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "put_record", full)
        await done(plane, acme, "PUT", "sql/pin")
    assert "No space left" in caplog.text
    assert await plane.services.registry.records.outdated() == [("acme", "sql")]
    await lifecycle.write_records(plane.services.registry, plane.services.store)
    [(_, record)] = FolderStore(plane.store).list_records("names")
    assert record["pinned"] is True
