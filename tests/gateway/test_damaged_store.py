"""What tenants meet when the store has damaged their adapters, and how an upload mends them."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from adapters import folder_store
from adapters.blob_store import read_file
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane
from tests.gateway.test_resumable_uploads import begin

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def flip_last_bit(plane: ControlPlane) -> None:
    [weights] = plane.store.glob(f"sha256/*/*/{WEIGHTS}")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


async def test_known_files_of_a_damaged_adapter_are_sent_again_and_mend_it(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        files = adapter_files(seed=1)
        digest = bytes.fromhex((await plane.upload(acme, files)).json()["digest"])
        flip_last_bit(plane)
        assert (await begin(plane, acme, files)).json()["status"] == "open"
        assert (await plane.upload(other, files)).status_code == 201
        assert read_file(plane.services.store, digest, WEIGHTS) == files[WEIGHTS]
        assert (await begin(plane, acme, files, name="again")).json()["status"] == "complete"


async def test_whether_files_are_known_is_asked_within_the_tenants_uploads(
    valkey_url: str, tmp_path: Path
) -> None:
    """Since all of them are read for it."""
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=1)
        await plane.upload(acme, files)
        slots = plane.services.upload_slots
        with ExitStack() as taken:
            for _ in range(slots._per_tenant):
                taken.enter_context(slots.taken("acme"))
            answer = await begin(plane, acme, files)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_uploads")
        assert (await begin(plane, acme, files)).json()["status"] == "complete"


async def test_a_file_that_is_damaged_is_never_sent_whole(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        await plane.upload(acme, adapter_files(seed=1))
        flip_last_bit(plane)
        path = f"/v1/adapters/sql/files/{WEIGHTS}"
        answer = await plane.client.get(path, headers=acme)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert "Upload them again" in answer.json()["error"]["message"]
        assert "corrupt" in caplog.text and "Traceback" not in caplog.text
        caplog.clear()
        monkeypatch.setattr(folder_store, "PIECE_BYTES", 1000)  # so that it begins before its end is known
        got = b""
        with pytest.raises(httpx.RemoteProtocolError, match="complete message body"):
            async with plane.client.stream("GET", path, headers=acme) as streamed:
                assert streamed.status_code == 200
                async for piece in streamed.aiter_raw():
                    got += piece
        size = int(streamed.headers["content-length"])
        assert 0 < len(got) < size
        said = [record.getMessage() for record in caplog.records if record.name.startswith("gateway")]
        assert len(said) == 1 and "could not be sent to its end" in said[0]
        assert "Traceback" not in caplog.text
        assert (await plane.client.get(f"/v1/adapters/sql/files/{CONFIG}", headers=acme)).status_code == 200


async def test_a_manifest_that_cannot_be_read_is_the_stores_fault(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=1)
        await plane.upload(acme, files)
        [manifest] = plane.store.glob("sha256/*/*/manifest.json")
        manifest.write_text('{"oops":')
        for path in ("sql/files", f"sql/files/{WEIGHTS}"):
            answer = await plane.client.get(f"/v1/adapters/{path}", headers=acme)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert (await plane.upload(acme, files)).status_code == 201
        answer = await plane.client.get(f"/v1/adapters/sql/files/{WEIGHTS}", headers=acme)
        assert answer.content == files[WEIGHTS]
