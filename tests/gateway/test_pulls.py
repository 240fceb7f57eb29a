"""Adapters from a hub: only where allowed, only from its own hosts, bounded, and with clear faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.hub import HUGGING_FACE, Hub, HubOrigin
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane, model_info

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class FakeHub:
    """A server that answers as the hub does: a listing, and files behind a redirect to its CDN."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.asked: list[str] = []
        self.listing: bytes | None = None
        self.status = 200
        self.redirect = "http://{host}/cdn/{name}"
        self.cut_after: int | None = None
        self.host = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readline():
                while await reader.readline() != b"\r\n":
                    pass
                path = request.split()[1].decode()
                self.asked.append(path)
                self._answer(path, writer)
                await writer.drain()
                if self.cut_after is not None and "/cdn/" in path:
                    break
        finally:
            writer.close()

    def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        status, headers, body = self.status, "", b""
        name = path.rpartition("/")[2]
        if "/api/models/" in path:
            siblings = [
                {"rfilename": file} for file in (*self.files, "README.md", "runs/adapter_config.json")
            ]
            body = self.listing or json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
        elif "/resolve/" in path:
            status, headers = 302, f"Location: {self.redirect.format(host=self.host, name=name)}\r\n"
        elif path.startswith("/cdn/"):
            body = self.files[name]
        else:
            status = 404
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        writer.write(head.encode() + (body[: self.cut_after] if "/cdn/" in path else body))


@asynccontextmanager
async def pulling(
    valkey_url: str, tmp_path: Path, files: Mapping[str, bytes], **settings: Any
) -> AsyncIterator[tuple[ControlPlane, FakeHub]]:
    fake = FakeHub(files)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    hub = Hub(HubOrigin(f"http://{fake.host}", ("127.0.0.1",)))
    async with server, control_plane(valkey_url, tmp_path, hub=hub, **settings) as plane:
        yield plane, fake


async def pull(plane: ControlPlane, caller: Mapping[str, str], **body: Any) -> httpx.Response:
    asked = {"repo": "acme/sql-lora", "name": "sql", **body}
    return await plane.client.post("/v1/adapter-pulls", headers=caller, json=asked)


def fault(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_an_adapter_comes_from_one_commit_and_only_its_files(valkey_url: str, tmp_path: Path) -> None:
    files = adapter_files(seed=1)
    async with pulling(valkey_url, tmp_path, {**files, "optimizer.pt": b"x"}) as (plane, fake):
        acme = await plane.tenant("acme")
        made = await pull(plane, acme, revision="v1.0")
        assert (made.status_code, made.json()["id"]) == (201, "sql@1")
        assert made.json()["digest"] == (await plane.upload(acme, files)).json()["digest"]
        assert fake.asked == [
            "/api/models/acme/sql-lora/revision/v1.0",
            *[
                path
                for name in (CONFIG, WEIGHTS)
                for path in (f"/acme/sql-lora/resolve/{COMMIT}/{name}", f"/cdn/{name}")
            ],
        ]
        assert plane.leftovers() == []


async def test_it_is_off_unless_the_operator_allows_it(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        assert plane.services.settings.allow_hub_pull is False
        assert fault(await pull(plane, acme)) == (403, "pull_not_allowed")


@pytest.mark.parametrize(
    "target",
    [
        "http://localhost:{port}/cdn/x",
        "http://169.254.169.254/latest/meta-data",
        "https://127.0.0.1/x",
        "http://127.0.0.1:1/x",
        "http://user@{host}/cdn/{name}",
        "file:///etc/passwd",
        "http://127.0.0.1.evil.example/x",
        "http://[::1]/x",
    ],
)
async def test_no_redirect_leads_elsewhere(valkey_url: str, tmp_path: Path, target: str) -> None:
    async with pulling(valkey_url, tmp_path, adapter_files()) as (plane, fake):
        acme = await plane.tenant("acme")
        fake.redirect = target.replace("{port}", fake.host.rpartition(":")[2])
        answer = await pull(plane, acme)
        assert fault(answer) == (502, "hub_unavailable")
        assert "not its own" in answer.json()["error"]["message"]
        assert len(fake.asked) == 2 and plane.leftovers() == []


def test_the_hubs_own_hosts() -> None:
    allowed = ["https://huggingface.co/x", "https://cas-bridge.xethub.hf.co/x", "https://cdn-lfs.hf.co/x"]
    refused = ["http://huggingface.co/x", "https://hf.co.evil.example/", "https://evilhf.co/", "https://x/"]
    refused += [
        "https://huggingface.co:8443/x",
        "https://user@huggingface.co/x",
        "https://huggingface.co.evil/",
    ]
    assert all(HUGGING_FACE.allows(httpx.URL(url)) for url in allowed)
    assert not any(HUGGING_FACE.allows(httpx.URL(url)) for url in refused)


async def test_redirects_in_circles_end(valkey_url: str, tmp_path: Path) -> None:
    async with pulling(valkey_url, tmp_path, adapter_files()) as (plane, fake):
        acme = await plane.tenant("acme")
        fake.redirect = "http://{host}/x/resolve/{name}"
        assert fault(await pull(plane, acme)) == (502, "hub_unavailable")
        assert len(fake.asked) < 10


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"repo": "sql-lora"}, "repo"),
        ({"repo": "../../etc/passwd"}, "repo"),
        ({"repo": "acme/.."}, "repo"),
        ({"repo": "acme/x?y"}, "repo"),
        ({"repo": "https://evil.example/x"}, "repo"),
        ({"repo": "127.0.0.1:8000/x"}, "repo"),
        ({"revision": "../x"}, "revision"),
        ({"revision": "a\r\nb"}, "revision"),
        ({"name": "SQL"}, "name"),
    ],
)
async def test_what_is_no_place_on_the_hub_is_not_asked_for(
    valkey_url: str, tmp_path: Path, body: dict[str, str], param: str
) -> None:
    async with pulling(valkey_url, tmp_path, adapter_files()) as (plane, fake):
        acme = await plane.tenant("acme")
        answer = await pull(plane, acme, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert fake.asked == []


async def test_the_hubs_faults_are_told_apart(valkey_url: str, tmp_path: Path) -> None:
    async with pulling(valkey_url, tmp_path, adapter_files()) as (plane, fake):
        acme = await plane.tenant("acme")
        for status, expected in ((401, 400), (404, 400), (500, 502), (429, 502)):
            fake.status = status
            assert (await pull(plane, acme)).status_code == expected
        fake.status = 200
        for listing in (b"[", b"{}", b'{"sha": "main", "siblings": []}', b" " * (5 * 2**20)):
            fake.listing = listing
            assert (await pull(plane, acme)).status_code in (400, 502)
        fake.listing = None
        fake.files.pop(WEIGHTS)
        answer = await pull(plane, acme)
        assert fault(answer) == (400, "pull_refused") and WEIGHTS in answer.json()["error"]["message"]
        assert plane.leftovers() == plane.blobs() == []


async def test_a_connection_that_breaks_off_leaves_nothing(valkey_url: str, tmp_path: Path) -> None:
    async with pulling(valkey_url, tmp_path, adapter_files()) as (plane, fake):
        acme = await plane.tenant("acme")
        fake.cut_after = 100
        assert fault(await pull(plane, acme)) == (502, "hub_unavailable")
        assert plane.leftovers() == plane.blobs() == []


async def test_a_file_larger_than_is_taken_is_cut_off(valkey_url: str, tmp_path: Path) -> None:
    files = {**adapter_files(), WEIGHTS: bytes(3 * 2**20)}
    async with pulling(valkey_url, tmp_path, files, max_adapter_bytes=2**20) as (plane, _):
        plane.engines.info = model_info(hidden=4096)
        acme = await plane.tenant("acme")
        assert fault(await pull(plane, acme)) == (413, "upload_too_large")
        assert plane.leftovers() == plane.blobs() == []


async def test_what_comes_is_checked_like_any_upload(valkey_url: str, tmp_path: Path) -> None:
    async with pulling(valkey_url, tmp_path, {**adapter_files(), WEIGHTS: b"x" * 100}) as (plane, _):
        acme = await plane.tenant("acme")
        assert fault(await pull(plane, acme)) == (400, "invalid_adapter")
