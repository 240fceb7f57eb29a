"""Uploads to a bucket: the same answers as with a folder, and a clear one while the bucket is away."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from adapters import s3_bucket
from adapters.blob_store import BlobStore, read_file
from adapters.collector import collect
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane
from tests.s3_server import BUCKET, S3Server

WEIGHTS = "adapter_model.safetensors"
LOCATION = f"s3://{BUCKET}/loraplex"


def on_disk(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


async def test_an_upload_goes_to_the_bucket_and_is_collected_from_there(
    valkey_url: str, tmp_path: Path, s3: S3Server
) -> None:
    async with control_plane(valkey_url, tmp_path, store=LOCATION) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=1)
        made = await plane.upload(acme, files)
        assert made.status_code == 201
        digest = bytes.fromhex(made.json()["digest"])
        store: BlobStore = plane.services.store
        assert read_file(store, digest, WEIGHTS) == files[WEIGHTS]
        assert [record["name"] for _, record in store.list_records("names")] == ["sql"]
        fetched = await plane.client.get(f"/v1/adapters/sql/files/{WEIGHTS}", headers=acme)
        assert fetched.content == files[WEIGHTS]
        assert on_disk(tmp_path) == []
        await plane.client.delete("/v1/adapters/sql", headers=acme)
        assert await collect(plane.services.registry, store, grace_s=0) == 1
        assert list(store.digests()) == []


async def test_while_the_bucket_is_away_an_upload_is_503_and_leaves_nothing(
    valkey_url: str, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_bucket, "_RETRY_S", 0.2)
    async with control_plane(valkey_url, tmp_path, store=LOCATION) as plane:
        acme = await plane.tenant("acme")
        s3.is_away = True
        answer = await plane.upload(acme, adapter_files())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert "127.0.0.1" not in answer.text
        s3.is_away = False
        assert (await plane.client.get("/v1/adapters", headers=acme)).json()["data"] == []
        assert on_disk(tmp_path) == []
        assert (await plane.upload(acme, adapter_files())).json()["id"] == "sql@1"


async def test_a_resumable_upload_outlives_an_outage_of_the_bucket(
    valkey_url: str, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_bucket, "_RETRY_S", 0.2)
    async with control_plane(valkey_url, tmp_path, store=LOCATION) as plane:
        acme = await plane.tenant("acme")
        upload = await begun_with_all(plane, acme, adapter_files())
        s3.is_away = True
        answer = await plane.client.post(f"{upload}/complete", headers=acme)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        s3.is_away = False
        shown = (await plane.client.get(upload, headers=acme)).json()
        assert all(file["offset"] == file["bytes"] for file in shown["files"])
        assert (await plane.client.post(f"{upload}/complete", headers=acme)).json()["id"] == "sql@1"
        assert on_disk(tmp_path) == []


async def begun_with_all(plane: ControlPlane, caller: dict[str, str], files: dict[str, bytes]) -> str:
    """An upload whose files have all arrived. Returns its path."""
    described = [
        {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]
    body = {"name": "sql", "files": described}
    begun = await plane.client.post("/v1/adapter-uploads", headers=caller, json=body)
    path = f"/v1/adapter-uploads/{begun.json()['id']}"
    for name, content in files.items():
        headers = {**caller, "Upload-Offset": "0"}
        assert (await plane.client.patch(f"{path}/{name}", headers=headers, content=content)).is_success
    return path
