"""Uploads file by file: what broke off goes on, what is known is not sent, and whose is whose."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import upload_transfers
from gateway.incoming_files import FileWriter, IncomingFile, Piece
from tests.gateway.control_plane import (
    ControlPlane,
    adapter_files,
    control_plane,
    model_info,
    safetensors,
    tensor_shapes,
)
from tests.gateway.memory import peak, reset_peak

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Headers = Mapping[str, str]


def announced(files: Mapping[str, bytes], name: str = "sql", **options: Any) -> dict[str, Any]:
    described = [
        {"name": file, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for file, content in files.items()
    ]
    return {"name": name, "files": described, **options}


async def begin(
    plane: ControlPlane, caller: Headers, files: Mapping[str, bytes], **more: Any
) -> httpx.Response:
    return await plane.client.post("/v1/adapter-uploads", headers=caller, json=announced(files, **more))


async def append(
    plane: ControlPlane, caller: Headers, upload: str, file: str, content: Any, offset: int = 0
) -> httpx.Response:
    path = f"/v1/adapter-uploads/{upload}/{file}"
    return await plane.client.patch(path, headers={**caller, "Upload-Offset": str(offset)}, content=content)


async def complete(plane: ControlPlane, caller: Headers, upload: str) -> httpx.Response:
    return await plane.client.post(f"/v1/adapter-uploads/{upload}/complete", headers=caller)


async def send(
    plane: ControlPlane, caller: Headers, files: Mapping[str, bytes], **more: Any
) -> httpx.Response:
    """A whole upload."""
    upload = (await begin(plane, caller, files, **more)).json()["id"]
    for file, content in files.items():
        assert (await append(plane, caller, upload, file, content)).status_code == 200
    return await complete(plane, caller, upload)


def offsets(session: Mapping[str, Any]) -> dict[str, int]:
    return {file["name"]: file["offset"] for file in session["files"]}


class Arrivals:
    """How many bytes of each file transfers have taken, also those that are not on the disk yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: Counter[str] = Counter()
        add = FileWriter.add

        def counted(writer: FileWriter, file: IncomingFile, piece: Piece) -> None:
            add(writer, file, piece)
            self.taken[file.path.name] += len(piece)

        monkeypatch.setattr(FileWriter, "add", counted)

    async def of(self, file: str, count: int) -> None:
        """Waits until so many bytes of a file have come."""
        async with asyncio.timeout(60):
            while self.taken[file] < count:
                await asyncio.sleep(0.01)


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    return Arrivals(monkeypatch)


def scratch(plane: ControlPlane) -> list[Path]:
    return [path for path in (plane.store / "uploads").rglob("*") if path.is_file()]


async def test_files_sent_one_by_one_become_a_version(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=1)
        begun = await begin(plane, acme, files)
        assert begun.status_code == 201
        session = begun.json()
        assert (session["status"], session["name"]) == ("open", "sql")
        assert offsets(session) == {CONFIG: 0, WEIGHTS: 0}
        assert session["expires"] > time.time() + 3600
        for file, content in files.items():
            sent = await append(plane, acme, session["id"], file, content)
            assert (sent.json()["offset"], sent.headers["upload-offset"]) == (len(content), str(len(content)))
        made = await complete(plane, acme, session["id"])
        assert (made.status_code, made.json()["id"]) == (201, "sql@1")
        assert (await plane.upload(acme, files)).json()["digest"] == made.json()["digest"]
        assert plane.leftovers() == scratch(plane) == []
        assert (await complete(plane, acme, session["id"])).status_code == 404


async def test_an_upload_is_not_forgotten_while_the_stores_volume_is_gone(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=2)
        upload = (await begin(plane, acme, files)).json()["id"]
        away = plane.store.rename(tmp_path / "elsewhere")
        for answer in (
            await append(plane, acme, upload, CONFIG, files[CONFIG]),
            await begin(plane, acme, files),
            await complete(plane, acme, upload),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert not plane.store.exists()
        away.rename(plane.store)
        for file, content in files.items():
            assert (await append(plane, acme, upload, file, content)).status_code == 200
        assert (await complete(plane, acme, upload)).status_code == 201


async def test_what_broke_off_goes_on_where_it_was(
    valkey_url: str, tmp_path: Path, arrivals: Arrivals
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=2)
        upload = (await begin(plane, acme, files)).json()["id"]
        await append(plane, acme, upload, CONFIG, files[CONFIG])

        async def broken() -> AsyncIterator[bytes]:
            yield files[WEIGHTS][:3000]
            await arrivals.of(WEIGHTS, 3000)
            raise RuntimeError("the connection is lost")

        with pytest.raises(RuntimeError):
            await append(plane, acme, upload, WEIGHTS, broken())
        async with asyncio.timeout(60):
            while True:
                again = (await begin(plane, acme, files)).json()
                if offsets(again)[WEIGHTS] == 3000:
                    break
                await asyncio.sleep(0.02)
        assert again["id"] == upload
        assert offsets(again)[CONFIG] == len(files[CONFIG])
        shown = await plane.client.get(f"/v1/adapter-uploads/{upload}", headers=acme)
        assert offsets(shown.json()) == offsets(again)
        early = await complete(plane, acme, upload)
        assert (early.status_code, early.json()["error"]["code"]) == (409, "upload_incomplete")
        wrong = await append(plane, acme, upload, WEIGHTS, files[WEIGHTS][2000:], 2000)
        assert (wrong.status_code, wrong.headers["upload-offset"]) == (409, "3000")
        await append(plane, acme, upload, WEIGHTS, files[WEIGHTS][3000:], 3000)
        made = await complete(plane, acme, upload)
        assert made.status_code == 201
        assert made.json()["digest"] == (await plane.upload(acme, files)).json()["digest"]


async def test_an_upload_goes_on_after_a_restart_of_the_gateway(valkey_url: str, tmp_path: Path) -> None:
    files = adapter_files(seed=3)
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        upload = (await begin(plane, acme, files)).json()["id"]
        await append(plane, acme, upload, CONFIG, files[CONFIG])
        await append(plane, acme, upload, WEIGHTS, files[WEIGHTS][:1000])
    async with control_plane(valkey_url, tmp_path) as plane:
        await append(plane, acme, upload, WEIGHTS, files[WEIGHTS][1000:], 1000)
        assert (await complete(plane, acme, upload)).status_code == 201


async def test_a_later_connection_takes_over_from_one_that_hangs(
    valkey_url: str, tmp_path: Path, arrivals: Arrivals
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=4)
        upload = (await begin(plane, acme, files)).json()["id"]
        await append(plane, acme, upload, CONFIG, files[CONFIG])
        hang = asyncio.Event()

        async def hanging() -> AsyncIterator[bytes]:
            yield files[WEIGHTS][:500]
            await hang.wait()

        first = asyncio.create_task(append(plane, acme, upload, WEIGHTS, hanging()))
        await arrivals.of(WEIGHTS, 500)
        taken = await append(plane, acme, upload, WEIGHTS, files[WEIGHTS][500:], 500)
        assert taken.status_code == 200
        assert (await complete(plane, acme, upload)).status_code == 201
        hang.set()
        with pytest.raises(httpx.TransportError):
            assert (await first).status_code == 408
            raise httpx.WriteError("the answer came before the body had been sent")


async def test_silence_ends_a_connection_and_keeps_what_came(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrivals: Arrivals
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files()
        upload = (await begin(plane, acme, files)).json()["id"]

        async def silent() -> AsyncIterator[bytes]:
            yield files[WEIGHTS][:499]
            await arrivals.of(WEIGHTS, 499)
            monkeypatch.setattr(upload_transfers, "_IDLE_S", 0.1)  # from the next byte on
            yield files[WEIGHTS][499:500]
            async with asyncio.timeout(60):
                while plane.services.upload_transfers._running:
                    await asyncio.sleep(0.01)
            yield b"late"

        answer = await append(plane, acme, upload, WEIGHTS, silent())
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "upload_timeout")
        assert offsets((await begin(plane, acme, files)).json())[WEIGHTS] == 500


async def test_known_files_are_not_sent_again(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=5)
        first = (await plane.upload(acme, files, name="first")).json()
        known = await begin(plane, acme, files, name="second")
        assert (known.status_code, known.json()["status"]) == (201, "complete")
        second = known.json()["adapter"]
        assert second["id"] == "second@1" and scratch(plane) == []
        assert {**first, "created": 0} == {**second, "id": "first@1", "name": "first", "created": 0}
        staged = (await begin(plane, acme, files, name="second", promote=False)).json()["adapter"]
        shown = (await plane.client.get("/v1/adapters/second", headers=acme)).json()
        assert (staged["id"], shown["live"]) == ("second@2", 1)


async def test_what_a_tenant_has_deleted_is_sent_again(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        files = adapter_files(seed=6)
        await plane.upload(acme, files)
        await plane.upload(other, files)
        await plane.client.delete("/v1/adapters/sql", headers=acme)
        assert (await begin(plane, acme, files)).json()["status"] == "open"


async def test_a_tenant_does_not_learn_what_others_have(valkey_url: str, tmp_path: Path) -> None:
    """The answers for bytes that another tenant has equal those for bytes that nobody has."""
    async with control_plane(valkey_url, tmp_path) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        theirs, nobodys = adapter_files(seed=7), adapter_files(seed=8)
        digest = (await plane.upload(acme, theirs)).json()["digest"]
        answers = [(await begin(plane, other, files)).json() for files in (theirs, nobodys)]
        assert [answer["status"] for answer in answers] == ["open", "open"]
        assert offsets(answers[0]) == offsets(answers[1])
        made = await send(plane, other, theirs)
        assert (made.status_code, made.json()["digest"]) == (201, digest)


async def test_an_upload_is_its_tenants_alone(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        files = adapter_files()
        upload = (await begin(plane, acme, files)).json()["id"]
        own = await begin(plane, other, files)
        assert own.json()["id"] == upload  # the same hash, in another place
        await plane.client.delete(f"/v1/adapter-uploads/{upload}", headers=other)
        absent = [
            await plane.client.get(f"/v1/adapter-uploads/{upload}", headers=other),
            await append(plane, other, upload, CONFIG, b"x"),
            await complete(plane, other, upload),
            await plane.client.delete(f"/v1/adapter-uploads/{upload}", headers=other),
        ]
        assert [answer.status_code for answer in absent] == [404] * 4
        for unknown in ("0" * 32, "..", "%2e%2e", "x"):
            answer = await plane.client.get(f"/v1/adapter-uploads/{unknown}", headers=other)
            assert answer.status_code == 404
        for elsewhere in (f"../acme/{upload}", f"../../uploads/acme/{upload}", f"{upload}/../{upload}"):
            assert plane.services.upload_sessions.find("other", elsewhere) is None
        assert (await append(plane, acme, upload, CONFIG, files[CONFIG])).status_code == 200


async def test_bytes_that_are_not_what_was_announced_are_sent_again(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files(seed=9)
        upload = (await begin(plane, acme, files)).json()["id"]
        await append(plane, acme, upload, CONFIG, files[CONFIG])
        mixed = files[WEIGHTS][:2000] + adapter_files(seed=10)[WEIGHTS][2000:]
        await append(plane, acme, upload, WEIGHTS, mixed)
        answer = await complete(plane, acme, upload)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "hash_mismatch")
        assert WEIGHTS in answer.json()["error"]["message"]
        assert offsets((await begin(plane, acme, files)).json()) == {CONFIG: len(files[CONFIG]), WEIGHTS: 0}
        await append(plane, acme, upload, WEIGHTS, files[WEIGHTS])
        assert (await complete(plane, acme, upload)).status_code == 201


async def test_more_bytes_than_announced_are_refused(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = adapter_files()
        upload = (await begin(plane, acme, files)).json()["id"]
        answer = await append(plane, acme, upload, CONFIG, files[CONFIG] + b"x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_upload")
        assert (await append(plane, acme, upload, "tokenizer.json", b"{}")).status_code == 400
        assert (await append(plane, acme, upload, CONFIG, b"", "x")).status_code == 400  # type: ignore[arg-type]


async def test_a_bad_adapter_is_refused_when_complete_and_leaves_nothing(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        files = {**adapter_files(), WEIGHTS: safetensors(tensor_shapes(rank=3))}
        answer = await send(plane, acme, files)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_adapter")
        assert plane.blobs() == plane.leftovers() == scratch(plane) == []


BAD_ANNOUNCEMENTS: dict[str, tuple[dict[str, Any], int]] = {
    "no weights": (announced({CONFIG: b"{}"}), 400),
    "pickle": (announced({**adapter_files(), "adapter_model.bin": b"x"}), 400),
    "path": (announced({**adapter_files(), f"../{WEIGHTS}": b"x"}), 400),
    "twice": ({"name": "sql", "files": announced(adapter_files())["files"] * 2}, 400),
    "no hash": ({"name": "sql", "files": [{"name": CONFIG, "bytes": 1, "sha256": "x"}]}, 400),
    "bad name": (announced(adapter_files(), name="SQL"), 400),
    "the base model's name": (announced(adapter_files(), name="base"), 400),
    "too large": (
        {"name": "sql", "files": [*announced({CONFIG: b"{}"})["files"],
                                  {"name": WEIGHTS, "bytes": 2**40, "sha256": "0" * 64}]},
        413,
    ),
}  # fmt: skip


async def test_what_can_never_be_an_adapter_is_refused_before_a_byte_is_sent(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        for case, (body, status) in BAD_ANNOUNCEMENTS.items():
            answer = await plane.client.post("/v1/adapter-uploads", headers=acme, json=body)
            assert answer.status_code == status, (case, answer.text)
        assert scratch(plane) == []


async def test_a_tenant_has_so_many_uploads_at_once(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path, uploads_per_tenant=2) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        for seed in (1, 2):
            assert (await begin(plane, acme, adapter_files(seed=seed))).status_code == 201
        answer = await begin(plane, acme, adapter_files(seed=3))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_uploads")
        assert answer.headers["retry-after"] and "2 uploads" in answer.json()["error"]["message"]
        assert (await begin(plane, acme, adapter_files(seed=1))).status_code == 201
        assert (await begin(plane, other, adapter_files(seed=3))).status_code == 201
        idle = next((plane.store / "uploads" / "acme").iterdir())
        two_hours_ago = time.time() - 7200
        os.utime(idle, (two_hours_ago, two_hours_ago))
        assert (await begin(plane, acme, adapter_files(seed=3))).status_code == 201
        assert not idle.exists()
        for folder in (plane.store / "uploads" / "acme").iterdir():
            os.utime(folder, (two_hours_ago, two_hours_ago))
        for seed in (3, 4):  # the one that goes on is idle no more, so the other gives way
            assert (await begin(plane, acme, adapter_files(seed=seed))).status_code == 201
        assert (await begin(plane, acme, adapter_files(seed=5))).status_code == 429


async def test_a_tenants_running_transfers_are_limited_and_counted_back(
    valkey_url: str, tmp_path: Path
) -> None:
    async with control_plane(valkey_url, tmp_path, uploads_per_tenant=1) as plane:
        acme, other = await plane.tenant("acme"), await plane.tenant("other")
        files = adapter_files()
        upload = (await begin(plane, acme, files)).json()["id"]
        release = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield files[WEIGHTS][:100]
            await release.wait()
            yield files[WEIGHTS][100:]

        running = asyncio.create_task(append(plane, acme, upload, WEIGHTS, slow()))
        while not scratch(plane)[1:]:
            await asyncio.sleep(0.01)
        refused = await plane.upload(acme, adapter_files(seed=2))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_uploads")
        assert (await plane.upload(other, adapter_files(seed=2))).status_code == 201
        release.set()
        assert (await running).status_code == 200
        assert (await plane.upload(acme, adapter_files(seed=2))).status_code == 201


async def test_uploads_expire(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        upload = (await begin(plane, acme, adapter_files())).json()["id"]
        assert plane.services.upload_sessions.clean() == 0
        folder = plane.store / "uploads" / "acme"
        os.utime(folder / upload, (0, 0))
        assert (await complete(plane, acme, upload)).status_code == 404
        assert plane.services.upload_sessions.clean() == 1
        assert list(folder.iterdir()) == []
        os.utime(folder, (0, 0))
        assert plane.services.upload_sessions.clean() == 0 and not folder.exists()


async def test_two_uploads_of_one_name_at_once_are_two_versions(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        acme = await plane.tenant("acme")
        both = [adapter_files(seed=seed) for seed in (11, 12)]
        made = await asyncio.gather(*(send(plane, acme, files) for files in both))
        assert sorted(answer.json()["id"] for answer in made) == ["sql@1", "sql@2"]
        alone = [(await plane.upload(acme, files, name="alone")).json()["digest"] for files in both]
        assert [answer.json()["digest"] for answer in made] == alone


async def test_memory_stays_flat_while_a_large_file_arrives(valkey_url: str, tmp_path: Path) -> None:
    async with control_plane(valkey_url, tmp_path) as plane:
        plane.engines.info = model_info(layers=8, hidden=4096, max_lora_rank=1024)
        acme = await plane.tenant("acme")
        size, zeros = 200 * 2**20, bytes(2**20)
        described = announced(adapter_files())
        weights = next(file for file in described["files"] if file["name"] == WEIGHTS)
        weights["bytes"] = size
        begun = await plane.client.post("/v1/adapter-uploads", headers=acme, json=described)

        async def body() -> AsyncIterator[bytes]:
            for _ in range(size // len(zeros)):
                yield zeros

        before = reset_peak()
        answer = await append(plane, acme, begun.json()["id"], WEIGHTS, body())
        assert answer.json()["offset"] == size
        assert peak() - before < 32 * 2**20
