"""Uploads to a bucket: the same answers as with a folder, and a clear one while the bucket is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters import s3_store
from adapters.blob_store import BlobStore, read_file
from adapters.collector import collect
from tests.gateway.control_plane import adapter_files, control_plane
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
    monkeypatch.setattr(s3_store, "_RETRY_S", 0.2)
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
