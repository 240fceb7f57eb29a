"""Uploads file by file of which several gateways take parts, or that do not end as they should."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from adapters import lifecycle
from gateway.api import uploads
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane
from tests.gateway.test_resumable_uploads import (
    CONFIG,
    WEIGHTS,
    Arrivals,
    Headers,
    append,
    begin,
    complete,
    offsets,
    scratch,
)


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    return Arrivals(monkeypatch)


async def sent(plane: ControlPlane, caller: Headers, files: dict[str, bytes]) -> str:
    """An upload whose files are all there. Returns its id."""
    upload = (await begin(plane, caller, files)).json()["id"]
    for file, content in files.items():
        assert (await append(plane, caller, upload, file, content)).status_code == 200
    return upload


async def test_a_connection_to_another_gateway_changes_nothing_that_is_published(
    valkey_url: str, tmp_path: Path, arrivals: Arrivals
) -> None:
    async with control_plane(valkey_url, tmp_path) as one, control_plane(valkey_url, tmp_path) as other:
        acme = await one.tenant("acme")
        files = adapter_files(seed=1)
        upload = (await begin(one, acme, files)).json()["id"]
        await append(one, acme, upload, CONFIG, files[CONFIG])
        go_on = asyncio.Event()

        async def hanging() -> AsyncIterator[bytes]:
            yield files[WEIGHTS][:10]
            await go_on.wait()
            yield files[WEIGHTS][10:]

        hangs = asyncio.create_task(append(other, acme, upload, WEIGHTS, hanging()))
        await arrivals.of(WEIGHTS, 10)
        assert (await append(one, acme, upload, WEIGHTS, files[WEIGHTS])).status_code == 200
        made = await complete(one, acme, upload)
        go_on.set()
        await hangs
        assert made.status_code == 201
        blob = one.store / "sha256" / made.json()["digest"][:2] / made.json()["digest"]
        assert {file: (blob / file).read_bytes() for file in files} == files


async def test_what_came_anew_by_another_gateway_is_not_taken_for_what_was_there(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as one, control_plane(valkey_url, tmp_path) as other:
        acme = await one.tenant("acme")
        files, others = adapter_files(seed=1), adapter_files(seed=2)
        upload = await sent(one, acme, files)
        await other.client.delete(f"/v1/adapter-uploads/{upload}", headers=acme)
        assert (await begin(other, acme, files)).json()["id"] == upload
        for file, content in others.items():
            await append(other, acme, upload, file, content)
        answer = await complete(one, acme, upload)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "hash_mismatch")
        assert one.blobs() == one.leftovers() == []


async def test_an_upload_without_room_is_completed_when_there_is_some(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=1)
        await plane.upload(acme, adapter_files(seed=9), name="another")
        upload = await sent(plane, acme, files)
        await plane.admin("PATCH", "/tenants/acme", {"limits": {"adapters": 1}})
        async with asyncio.timeout(60):  # till the key's tenant is read anew
            while (refused := await complete(plane, acme, upload)).status_code == 201:
                await plane.client.delete("/v1/adapters/sql", headers=acme)
                upload = await sent(plane, acme, files)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_quota_exceeded")
        assert offsets((await plane.client.get(f"/v1/adapter-uploads/{upload}", headers=acme)).json()) == {
            file: len(content) for file, content in files.items()
        }
        await plane.admin("PATCH", "/tenants/acme", {"limits": {"adapters": None}})
        async with asyncio.timeout(60):
            while (made := await complete(plane, acme, upload)).status_code == 409:
                await asyncio.sleep(0.02)
        assert made.status_code == 201 and scratch(plane) == plane.leftovers() == []


async def test_an_upload_whose_completion_was_killed_is_completed_later(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = adapter_files(seed=1)
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        upload = await sent(plane, acme, files)
        as_it_was = tmp_path / "as-it-was"

        async def dies(*_: Any, **__: Any) -> None:
            shutil.copytree(plane.store, as_it_was)
            raise OSError("killed")

        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "publish", dies)
            assert (await complete(plane, acme, upload)).status_code == 503
    shutil.rmtree(tmp_path / "store")
    as_it_was.rename(tmp_path / "store")
    async with control_plane(valkey_url, tmp_path) as plane:
        assert (await begin(plane, acme, files)).json()["id"] == upload
        assert (await complete(plane, acme, upload)).status_code == 201


async def test_of_two_calls_that_complete_an_upload_one_makes_a_version(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        upload = await sent(plane, acme, adapter_files(seed=1))
        reached, go_on = asyncio.Event(), asyncio.Event()
        publish_folder = uploads.publish_folder

        async def slow(*args: Any, **more: Any) -> Any:
            reached.set()
            await go_on.wait()
            return await publish_folder(*args, **more)

        monkeypatch.setattr(uploads, "publish_folder", slow)
        first = asyncio.create_task(complete(plane, acme, upload))
        await reached.wait()
        second = await complete(plane, acme, upload)
        go_on.set()
        assert (await first).json()["id"] == "sql@1"
        assert (second.status_code, second.json()["error"]["code"]) == (409, "upload_completing")
        assert (await complete(plane, acme, upload)).status_code == 404


async def test_what_the_store_has_lost_is_sent_again_and_served(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=1)
        made = await complete(plane, acme, await sent(plane, acme, files))
        [digest] = plane.blobs()
        shutil.rmtree(plane.store / "sha256" / digest[:2] / digest)
        assert (await begin(plane, acme, files)).json()["status"] == "open"
        again = await complete(plane, acme, await sent(plane, acme, files))
        assert (again.status_code, again.json()["digest"]) == (201, made.json()["digest"])
        assert plane.blobs() == [digest]
        assert (await begin(plane, acme, files)).json()["status"] == "complete"
