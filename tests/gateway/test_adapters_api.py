"""Adapters over HTTP: what is taken, what is refused with the fault's name, and whose is whose."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import re
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.control_plane import (
    ControlPlane,
    adapter_files,
    config_json,
    control_plane,
    model_info,
    safetensors,
    safetensors_header,
    tensor_shapes,
)
from tests.gateway.memory import peak, reset_peak

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


async def test_an_adapter_is_uploaded_shown_and_deleted(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        made = await plane.upload(acme, adapter_files(seed=1))
        assert made.status_code == 201
        adapter = made.json()
        assert (adapter["id"], adapter["version"], adapter["rank"]) == ("sql@1", 1, 4)
        assert adapter["target_modules"] == ["q_proj", "o_proj"]
        second = (await plane.upload(acme, adapter_files(seed=2))).json()
        assert second["id"] == "sql@2"
        assert second["digest"] != adapter["digest"]
        listed = (await plane.client.get("/v1/adapters", headers=acme)).json()
        meaning = {**second, "live": 2, "canary": None, "pinned": False}
        assert listed == {"object": "list", "data": [meaning], "bytes": adapter["bytes"] + second["bytes"]}
        shown = (await plane.client.get("/v1/adapters/sql", headers=acme)).json()
        versions = {"versions": [adapter, second], "grants": [], "residency": {"engine-1": "device"}}
        versions["engines"] = await plane.engines.adapter_states(b"")
        assert shown == {**meaning, **versions}
        assert plane.blobs() == sorted([adapter["digest"], second["digest"]])
        gone = await plane.client.delete("/v1/adapters/sql", headers=acme)
        assert gone.json() == {"id": "sql", "object": "adapter.deleted", "deleted": True}
        await plane.collect()
        assert plane.blobs() == plane.leftovers() == []
        assert {digest.hex() for digest in plane.engines.unloaded} == {adapter["digest"], second["digest"]}
        assert (await plane.client.delete("/v1/adapters/sql", headers=acme)).status_code == 404


async def test_two_tenants_have_each_their_own_sql(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        of_acme = (await plane.upload(acme, adapter_files(seed=1))).json()
        of_other = (await plane.upload(other, adapter_files(seed=2))).json()
        assert of_acme["digest"] != of_other["digest"]
        for headers, own in ((acme, of_acme), (other, of_other)):
            shown = (await plane.client.get("/v1/adapters/sql", headers=headers)).json()
            assert [version["digest"] for version in shown["versions"]] == [own["digest"]]
        await plane.client.delete("/v1/adapters/sql", headers=other)
        await plane.collect()
        assert (await plane.client.get("/v1/adapters/sql", headers=acme)).json()["digest"] == of_acme[
            "digest"
        ]
        assert plane.blobs() == [of_acme["digest"]]


async def test_a_blob_stays_while_anyone_refers_to_it(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        digest = (await plane.upload(acme, adapter_files(seed=1), name="a")).json()["digest"]
        assert (await plane.upload(other, adapter_files(seed=1), name="b")).json()["digest"] == digest
        await plane.client.delete("/v1/adapters/a", headers=acme)
        await plane.collect()
        assert (plane.blobs(), plane.engines.unloaded) == ([digest], [])
        await plane.client.delete("/v1/adapters/b", headers=other)
        await plane.collect()
        assert (plane.blobs(), plane.engines.unloaded) == ([], [bytes.fromhex(digest)])


async def test_anothers_adapter_is_answered_as_one_that_does_not_exist(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        await plane.upload(acme, adapter_files(), name="theirs")
        for method in ("GET", "DELETE"):
            theirs = await plane.client.request(method, "/v1/adapters/theirs", headers=other)
            nobodys = await plane.client.request(method, "/v1/adapters/nobody", headers=other)
            assert theirs.status_code == nobodys.status_code == 404
            assert theirs.content.replace(b"theirs", b"nobody") == nobodys.content
            volatile = {"date", "x-request-id"}
            headers = [
                {name: value for name, value in answer.headers.items() if name not in volatile}
                for answer in (theirs, nobodys)
            ]
            assert headers[0] == headers[1]
        assert (await plane.client.get("/v1/adapters/theirs", headers=acme)).status_code == 200


def _pickled() -> bytes:
    return pickle.dumps({"lora": [1.0]}, protocol=2)


def _nan_weights() -> bytes:
    whole = bytearray(safetensors(tensor_shapes()))
    whole[-4:] = struct.pack("<f", float("nan"))
    return bytes(whole)


_SHAPES = tensor_shapes()
_WRONG_SHAPES = {**_SHAPES, next(iter(_SHAPES)): (4, 31)}
_FIRST = next(iter(_SHAPES))
BAD_UPLOADS: dict[str, tuple[dict[str, bytes], str]] = {
    "truncated weights": ({CONFIG: config_json(), WEIGHTS: safetensors(_SHAPES)[:-100]}, "truncated"),
    "empty weights": ({CONFIG: config_json(), WEIGHTS: b""}, "0 bytes"),
    "header of 1 GB": ({CONFIG: config_json(), WEIGHTS: struct.pack("<Q", 1 << 30) + b"{}"}, "header"),
    "header of 2^64": ({CONFIG: config_json(), WEIGHTS: b"\xff" * 64}, "header"),
    "wrong shape": ({CONFIG: config_json(), WEIGHTS: safetensors(_WRONG_SHAPES)}, re.escape(_FIRST)),
    "unknown module": (
        {
            CONFIG: config_json(target_modules=["q_proj", "w_proj"]),
            WEIGHTS: safetensors(tensor_shapes(modules=("q_proj", "w_proj"))),
        },
        "w_proj",
    ),
    "layer out of range": (
        {CONFIG: config_json(), WEIGHTS: safetensors(tensor_shapes(layers=3))},
        r"layers\.2|layer",
    ),
    "missing tensors": (
        {CONFIG: config_json(), WEIGHTS: safetensors(tensor_shapes(modules=("q_proj",)))},
        "o_proj",
    ),
    "pickle as weights": ({CONFIG: config_json(), WEIGHTS: _pickled()}, "no safetensors file"),
    "pickle by name": ({CONFIG: config_json(), "adapter_model.bin": _pickled()}, "adapter_model.bin"),
    "NaN": ({CONFIG: config_json(), WEIGHTS: _nan_weights()}, "NaN"),
    "config that is not JSON": ({CONFIG: b"{", WEIGHTS: safetensors(_SHAPES)}, CONFIG),
    "config with a field that changes results": (
        {CONFIG: config_json(layer_replication=[[0, 2]]), WEIGHTS: safetensors(_SHAPES)},
        "layer_replication",
    ),
    "rank above the engine's": (
        {CONFIG: config_json(r=128), WEIGHTS: safetensors(tensor_shapes(rank=128))},
        "rank|128",
    ),
    "config too long": ({CONFIG: b" " * (2 << 20), WEIGHTS: safetensors(_SHAPES)}, CONFIG),
    "no weights": ({CONFIG: config_json()}, WEIGHTS),
    "no config": ({WEIGHTS: safetensors(_SHAPES)}, CONFIG),
    "path in the file's name": ({CONFIG: config_json(), f"../{WEIGHTS}": safetensors(_SHAPES)}, r"\.\./"),
}


async def refused(plane: ControlPlane, answer: httpx.Response, fault: str) -> None:
    """Asserts a 4xx in OpenAI's shape that names the fault, and that nothing is left of the upload."""
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert re.search(fault, f"{error['message']} {error['param']}"), error
    assert set(error) == {"message", "type", "param", "code"}
    assert plane.blobs() == plane.leftovers() == []
    assert await plane.services.redis.keys("loraplex:{adapters}:*") == []


async def test_each_bad_upload_is_refused_by_its_fault_and_leaves_nothing(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        for files, fault in BAD_UPLOADS.values():
            await refused(plane, await plane.upload(acme, files), fault)


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "../sql", "..", ".sql", "SQL", "sql@3", "sqł", "ѕql", "a" * 64, "sql ", "sql\n", "s\x00l"],
)
async def test_each_bad_name_is_refused(valkey_url: str, tmp_path: Path, name: str) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        answer = await plane.upload(acme, adapter_files(), name=name)
        await refused(plane, answer, "name")
        assert answer.json()["error"]["param"] == "name"


async def test_a_zero_adapter_is_taken_when_asked_for(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        header = safetensors_header(_SHAPES)
        zeros = {CONFIG: config_json(), WEIGHTS: header + bytes(len(safetensors(_SHAPES)) - len(header))}
        await refused(plane, await plane.upload(acme, zeros), "zero")
        await refused(plane, await plane.upload(acme, zeros, allow_zero="yes"), "allow_zero")
        assert (await plane.upload(acme, zeros, allow_zero="true")).status_code == 201


async def test_no_upload_before_an_engine_has_shown_its_model(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        plane.engines.info = None
        answer = await plane.upload(acme, adapter_files())
        assert answer.status_code == 503
        assert answer.headers["retry-after"]


async def test_a_body_that_is_no_form_is_refused(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        as_json = await plane.client.post("/v1/adapters", headers=acme, json={"name": "sql"})
        assert as_json.status_code == 415
        form = {**acme, "Content-Type": "multipart/form-data; boundary=x"}
        for body in (b"", b"nonsense", b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nsql'):
            await refused(plane, await plane.client.post("/v1/adapters", headers=form, content=body), "form")
        form["Content-Type"] = f"multipart/form-data; boundary={'x' * 300}"
        await refused(plane, await plane.client.post("/v1/adapters", headers=form, content=b""), "boundary")


async def test_the_base_models_name_is_taken(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        await refused(plane, await plane.upload(acme, adapter_files(), name="base"), "base model's name")


async def test_a_full_disk_is_503_and_logged_and_leaves_nothing(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(writes: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gateway.incoming_files._write", full)
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        answer = await plane.upload(acme, adapter_files())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert plane.blobs() == plane.leftovers() == []
    assert "No space left on device" in caplog.text


def _form_of(files: dict[str, bytes], boundary: str = "x") -> bytes:
    parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="name"\r\n\r\nsql\r\n'.encode()]
    for name, content in files.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        parts += [head.encode(), content, b"\r\n"]
    return b"".join([*parts, f"--{boundary}--\r\n".encode()])


async def test_a_client_that_goes_away_leaves_nothing(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        body = _form_of(adapter_files())
        host, port = plane.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = [f"{name}: {value}" for name, value in acme.items()]
        head += ["Host: x", "Content-Type: multipart/form-data; boundary=x", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join(["POST /v1/adapters HTTP/1.1", *head, "", ""]).encode() + body[:-500])
        await writer.drain()
        while not plane.leftovers():
            await asyncio.sleep(0.01)
        writer.transport.abort()
        async with asyncio.timeout(60):
            while plane.leftovers():
                await asyncio.sleep(0.01)
        assert plane.blobs() == []


@pytest.mark.parametrize("chunk", [1, 7, 4096])
async def test_the_form_may_arrive_in_any_pieces(valkey_url: str, tmp_path: Path, chunk: int) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        body = _form_of(adapter_files(seed=3))

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), chunk):
                yield body[start : start + chunk]

        form = {**acme, "Content-Type": "multipart/form-data; boundary=x"}
        made = await plane.client.post("/v1/adapters", headers=form, content=pieces())
        whole = await plane.upload(acme, adapter_files(seed=3))
        assert made.status_code == whole.status_code == 201
        assert made.json()["digest"] == whole.json()["digest"]


async def test_memory_stays_flat_for_a_large_adapter(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        plane.engines.info = model_info(layers=8, hidden=4096, max_lora_rank=1024)
        acme = await plane.tenant("acme")
        header = safetensors_header(tensor_shapes(layers=8, hidden=4096, rank=600))
        size = 8 * 2 * 2 * 4096 * 600 * 4
        assert size >= 300 * 2**20
        zeros = bytes(2**20)

        async def body() -> AsyncIterator[bytes]:
            form = _form_of({CONFIG: config_json(r=600), WEIGHTS: b"HERE"})
            start, end = form.split(b"HERE")
            yield start + header
            for sent in range(0, size, len(zeros)):
                yield zeros[: min(len(zeros), size - sent)]
            yield end

        peak_before = reset_peak()
        form = {**acme, "Content-Type": "multipart/form-data; boundary=x"}
        answer = await plane.client.post("/v1/adapters", headers=form, content=body(), timeout=120)
        assert answer.status_code == 400
        assert "zero" in answer.json()["error"]["message"]  # it was read to its end
        assert peak() - peak_before < 48 * 2**20
        assert plane.leftovers() == []


async def test_an_upload_beyond_the_limit_is_cut_off(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path, max_adapter_bytes=2**20) as plane:
        plane.engines.info = model_info(hidden=4096)
        acme = await plane.tenant("acme")
        too_long = {CONFIG: config_json(), WEIGHTS: bytes(3 * 2**20)}
        announced = await plane.upload(acme, too_long)
        body = _form_of(too_long)

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 2**16):
                yield body[start : start + 2**16]

        form = {**acme, "Content-Type": "multipart/form-data; boundary=x"}
        streamed = await plane.client.post("/v1/adapters", headers=form, content=pieces())
        for answer in (announced, streamed):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "upload_too_large"
        assert plane.leftovers() == plane.blobs() == []
