"""The client of resumable uploads against a real gateway, over connections that break."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from adapters import upload_client
from adapters.upload_client import LocalAdapter, UploadInterrupted, UploadRefused, upload
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane

WEIGHTS = "adapter_model.safetensors"


class Proxy:
    """Passes connections on, and cuts each after so many bytes of requests while `cuts` has numbers."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts: list[int] = []
        self.is_away = False
        self.received = 0
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
        self._accepting.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_away:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with closing(source), closing(target), suppress(OSError):
            while data := source.recv(1 << 14):
                if counted:
                    self.received += len(data)
                    if self.cuts and self.received >= self.cuts[0]:
                        self.cuts.pop(0)
                        break
                target.sendall(data)
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)


@asynccontextmanager
async def plane_behind_proxy(valkey_url: str, tmp_path: Path) -> AsyncIterator[tuple[ControlPlane, Proxy]]:
    async with control_plane(valkey_url, tmp_path) as plane:
        with closing(Proxy(plane.url)) as proxy:
            yield plane, proxy


def write(tmp_path: Path, **options: object) -> LocalAdapter:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in adapter_files(**options).items():  # type: ignore[arg-type]
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("PEFT writes one")
    return LocalAdapter(folder, "sql")


async def run(
    proxy: Proxy, headers: dict[str, str], adapter: LocalAdapter, on_sent: Callable[[int], None]
) -> dict:
    with httpx.Client(base_url=proxy.url, headers=headers, timeout=10) as http:
        return await asyncio.to_thread(functools.partial(upload, http, adapter, on_sent))


async def test_an_upload_over_breaking_connections_arrives_as_it_is(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_client, "_PAUSES_S", (0.05,) * 10)
    monkeypatch.setattr(upload_client, "_PIECE_BYTES", 1000)
    async with plane_behind_proxy(valkey_url, tmp_path) as (plane, proxy):
        acme = await plane.tenant("acme")
        adapter = write(tmp_path, seed=1)
        proxy.cuts = [4000, 7000, 9000]
        counts: list[int] = []
        made = await run(proxy, acme, adapter, counts.append)
        assert made["id"] == "sql@1" and proxy.cuts == []
        assert sum(counts) == adapter.nbytes
        assert made["digest"] == (await plane.upload(acme, adapter_files(seed=1))).json()["digest"]
        before = proxy.received
        known = await run(proxy, acme, adapter, counts.append)
        assert known["digest"] == made["digest"] and proxy.received - before < 2000
        assert sum(counts) == 2 * adapter.nbytes


async def test_an_upload_given_up_goes_on_with_the_same_command(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_client, "_PAUSES_S", (0.05,))
    monkeypatch.setattr(upload_client, "_PIECE_BYTES", 10_000)
    async with plane_behind_proxy(valkey_url, tmp_path) as (plane, proxy):
        acme = await plane.tenant("acme")
        adapter = write(tmp_path, seed=2)
        with (adapter.folder / "adapter_config.json").open("ab") as config:
            config.write(b" " * 500_000)
        sent: list[int] = []

        def break_off(count: int) -> None:
            sent.append(count)
            while sum(sent) > 400_000 and proxy.received < 350_000:
                time.sleep(0.01)  # what is sent lies in buffers
            if sum(sent) > 400_000:
                proxy.cuts, proxy.is_away = [0], True

        with pytest.raises(UploadInterrupted, match="same command again"):
            await run(proxy, acme, adapter, break_off)
        proxy.cuts, proxy.is_away, proxy.received = [], False, 0
        assert (await run(proxy, acme, adapter, lambda _: None))["id"] == "sql@1"
        assert proxy.received < 400_000


async def test_a_file_that_changes_meanwhile_is_never_half_of_each(valkey_url: str, tmp_path: Path) -> None:
    async with plane_behind_proxy(valkey_url, tmp_path) as (plane, proxy):
        acme = await plane.tenant("acme")
        adapter = write(tmp_path, seed=3)
        changed = adapter_files(seed=4)

        def change(_: int) -> None:
            (adapter.folder / WEIGHTS).write_bytes(changed[WEIGHTS])

        made = await run(proxy, acme, adapter, change)
        assert made["digest"] == (await plane.upload(acme, changed, name="whole")).json()["digest"]


async def test_a_refusal_is_handed_on(valkey_url: str, tmp_path: Path) -> None:
    async with plane_behind_proxy(valkey_url, tmp_path) as (plane, proxy):
        acme = await plane.tenant("acme")
        with pytest.raises(UploadRefused) as refused:
            await run(proxy, acme, write(tmp_path, r=3), lambda _: None)
        assert refused.value.answer.json()["error"]["code"] == "invalid_adapter"


def test_no_file_is_sent_but_the_adapters_own(tmp_path: Path) -> None:
    """Whatever a server names: it may be another than it seems."""
    (tmp_path / "secret").write_text("of this machine")
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", WEIGHTS):
        (folder / name).write_bytes(b"own")
    sent: list[tuple[str, bytes]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        if request.method == "PATCH":
            sent.append((request.url.path.rsplit("/", 1)[1], request.read()))
            return httpx.Response(200, json={})
        if request.url.path.endswith("/complete"):
            return httpx.Response(200, json={"id": "done"})
        names = ("../secret", str(tmp_path / "secret"), "adapter_config.json")
        files = [{"name": name, "offset": 0} for name in names]
        return httpx.Response(201, json={"status": "open", "id": "u", "files": files})

    with httpx.Client(transport=httpx.MockTransport(serve), base_url="http://other") as http:
        assert upload(http, LocalAdapter(folder, "a", False, True), lambda count: None) == {"id": "done"}
    assert sorted(sent) == [("adapter_config.json", b"own"), (WEIGHTS, b"own")]
