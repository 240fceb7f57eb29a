"""A store that does not answer holds up those who need it, each with so many calls, and nobody else."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenant_slots import DOWNLOADS_PER_TENANT
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane


@contextmanager
def hanging(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Has a method of a store hang until the block ends, or what is yielded is called."""
    goes_on, method = threading.Event(), getattr(owner, name)

    def hang(*args: Any) -> Any:
        assert goes_on.wait(120)
        return method(*args)

    monkeypatch.setattr(owner, name, hang)
    try:
        yield goes_on.set
    finally:
        goes_on.set()


async def content_of(plane: ControlPlane, caller: dict[str, str], file_id: str) -> httpx.Response:
    return await plane.client.get(f"/v1/files/{file_id}/content", headers=caller, timeout=120)


async def file_of(plane: ControlPlane, caller: dict[str, str]) -> str:
    form = {"file": ("lines.jsonl", b"{}\n")}
    made = await plane.client.post("/v1/files", headers=caller, data={"purpose": "batch"}, files=form)
    assert made.status_code == 200, made.text
    return made.json()["id"]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_while_downloads_hang_other_work_has_its_threads(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme", "inference", "adapters")
        file_id = await file_of(plane, acme)
        slots = plane.services.download_slots
        with hanging(plane.services.file_store, "read", monkeypatch) as go_on:
            waiting = [
                asyncio.create_task(content_of(plane, acme, file_id)) for _ in range(DOWNLOADS_PER_TENANT)
            ]
            await until(lambda: slots._taken["acme"] == DOWNLOADS_PER_TENANT)
            async with asyncio.timeout(60):
                assert await asyncio.to_thread(int) == 0
            refused = await content_of(plane, acme, file_id)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_downloads")
            assert int(refused.headers["retry-after"]) > 0
            globex = await plane.tenant("globex", "inference")
            assert (await content_of(plane, globex, file_id)).status_code == 404  # asks no store
            go_on()
            assert {(await task).status_code for task in waiting} == {200}
        await until(lambda: not slots._taken)
        assert (await content_of(plane, acme, file_id)).content == b"{}\n"


async def test_a_download_holds_its_place_until_it_has_been_sent_or_its_client_has_gone(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        assert (await plane.upload(acme, adapter_files())).status_code == 201
        slots = plane.services.download_slots

        def broken(digest: bytes, name: str) -> Iterator[bytes]:
            yield b"{"
            goes_on.wait(120)

        goes_on = threading.Event()
        monkeypatch.setattr(plane.services.store, "chunks", broken)
        path = "/v1/adapters/sql/files/adapter_config.json"
        async with plane.client.stream("GET", path, headers=acme) as answer:
            assert answer.status_code == 200
            assert slots._taken["acme"] == 1
        await asyncio.sleep(0.3)
        assert slots._taken["acme"] == 1, "a piece is still being read"
        goes_on.set()
        await until(lambda: not slots._taken)


async def test_what_a_download_has_begun_to_fetch_ends_in_a_thread_before_its_place_is_free(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To wait for it on the event loop would hold everybody up."""
    goes_on, ended = threading.Event(), list[threading.Thread]()

    def endless(digest: bytes, name: str) -> Iterator[bytes]:
        try:
            while True:
                yield bytes(1024 * 1024)
        finally:
            ended.append(threading.current_thread())
            goes_on.wait(120)

    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        assert (await plane.upload(acme, adapter_files())).status_code == 201
        slots, store = plane.services.download_slots, plane.services.store
        files = {"adapter_config.json": {"bytes": 2**40, "sha256": "0"}}
        monkeypatch.setattr(store, "manifest", lambda digest: {"files": files})
        monkeypatch.setattr(store, "chunks", endless)
        path = "/v1/adapters/sql/files/adapter_config.json"
        async with plane.client.stream("GET", path, headers=acme) as answer:
            assert answer.status_code == 200
        await until(lambda: ended)
        await asyncio.sleep(0.3)
        assert slots._taken["acme"] == 1
        goes_on.set()
        await until(lambda: not slots._taken)
        assert len(ended) == 1 and ended[0] is not threading.main_thread()


async def test_a_manifest_that_hangs_holds_a_tenant_to_its_places(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        assert (await plane.upload(acme, adapter_files())).status_code == 201
        listed, file = "/v1/adapters/sql/files", "/v1/adapters/sql/files/adapter_config.json"
        slots = plane.services.download_slots
        with hanging(plane.services.store, "manifest", monkeypatch) as go_on:
            asked = [listed, file] * (DOWNLOADS_PER_TENANT // 2)
            waiting = [
                asyncio.create_task(plane.client.get(path, headers=acme, timeout=120)) for path in asked
            ]
            await until(lambda: slots._taken["acme"] == DOWNLOADS_PER_TENANT)
            for path in (listed, file):
                refused = await plane.client.get(path, headers=acme, timeout=120)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_downloads")
            go_on()
            assert {(await task).status_code for task in waiting} == {200}
        await until(lambda: not slots._taken)


@pytest.mark.parametrize("kept", [0, 1, 1024 * 1024])
async def test_a_file_that_has_been_cut_is_503_or_breaks_off_and_the_log_says_so(
    valkey_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme", "inference")
        form = {"file": ("lines.jsonl", b" " * (2 * 1024 * 1024))}
        made = await plane.client.post("/v1/files", headers=acme, data={"purpose": "batch"}, files=form)
        file_id = made.json()["id"]
        os.truncate(tmp_path / "store" / "files" / "acme" / file_id, kept)
        if kept < 1024 * 1024:
            assert (await content_of(plane, acme, file_id)).status_code == 503
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await content_of(plane, acme, file_id)
        assert "has been cut" in caplog.text and "Traceback" not in caplog.text
