"""The `adapters` command against a real gateway and store: what it prints, writes and exits with."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from adapters.blob_store import sha256_of
from adapters.cli import app, main
from tests.gateway.control_plane import ControlPlane, adapter_files, control_plane


@dataclass(frozen=True)
class Result:
    exit_code: int
    out: str
    err: str


@dataclass
class Shell:
    """Runs the command as one tenant, in a working folder."""

    plane: ControlPlane
    folder: Path
    key: str

    async def __call__(self, *arguments: str | Path, key: str | None = None) -> Result:
        given = [*map(str, arguments), *(["--api-key", key] if key else [])]

        def run() -> Result:
            out, err = io.StringIO(), io.StringIO()
            with pytest.raises(SystemExit) as ended, redirect_stdout(out), redirect_stderr(err):
                main(given)
            assert "Traceback" not in err.getvalue()
            return Result(int(ended.value.code or 0), out.getvalue(), err.getvalue())

        return await asyncio.to_thread(run)

    def adapter(self, seed: int, **config: object) -> Path:
        folder = self.folder / f"adapter-{seed}"
        folder.mkdir()
        for name, content in adapter_files(seed=seed, **config).items():
            (folder / name).write_bytes(content)
        return folder

    async def upload(self, seed: int, *flags: str) -> None:
        done = await self("upload", self.adapter(seed), "--name", "sql", *flags)
        assert done.exit_code == 0, done.err


@pytest.fixture
async def shell(valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shell]:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    async with control_plane(valkey_url, tmp_path) as plane:
        key = (await plane.tenant("acme"))["Authorization"].removeprefix("Bearer ")
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("LORAPLEX_URL", plane.url)
        monkeypatch.setenv("LORAPLEX_API_KEY", key)
        yield Shell(plane, work, key)


async def says(shell: Shell, *arguments: str, out: str) -> None:
    done = await shell(*arguments)
    assert (done.exit_code, done.out, done.err) == (0, out, "")


async def fails(shell: Shell, *arguments: str, exit_code: int, err: str) -> None:
    done = await shell(*arguments)
    assert (done.exit_code, done.out) == (exit_code, "")
    assert err in done.err and done.err.startswith("error: ")


async def test_the_life_of_a_name(shell: Shell) -> None:
    await shell.upload(1)
    await shell.upload(2, "--no-promote")
    await says(
        shell, "canary", "sql", "2", "--percent", "10", out="sql means sql@1; canary sql@2 gets 10 %\n"
    )
    await says(shell, "canary", "sql", "--off", out="sql means sql@1\n")
    await says(shell, "pin", "sql", out="sql means sql@1; pinned\n")
    await says(shell, "promote", "sql", "2", out="sql means sql@2; pinned\n")
    await says(shell, "rollback", "sql", out="sql means sql@1; pinned\n")
    await says(shell, "unpin", "sql", out="sql means sql@1\n")
    await says(shell, "grant", "sql", "globex", out="globex may use acme/sql\n")
    shown = (await shell("show", "sql")).out
    assert "sql means sql@1\n" in shown and "shared with globex\n" in shown
    await says(shell, "revoke", "sql", "globex", out="globex may not use acme/sql\n")
    await says(shell, "delete", "sql@2", "-y", out="deleted sql@2\n")
    await says(shell, "rename", "sql", "database", out="database means database@1\n")
    lines = [line.split() for line in (await shell("history", "database")).out.splitlines()]
    assert [words[3] for words in lines[1:]] == [
        *("rename", "delete", "revoke", "grant", "unpin", "rollback", "promote", "pin", "canary", "canary"),
        *("upload", "upload"),
    ]


async def test_a_list_says_what_goes_for_each_name(shell: Shell) -> None:
    await shell.upload(1)
    await shell.upload(2, "--no-promote")
    done = await shell("upload", shell.adapter(3), "--name", "staged", "--no-promote")
    assert done.out.endswith("not live yet; make it so with: adapters promote staged 1\n")
    await shell("canary", "sql", "2", "--percent", "5")
    await shell("pin", "sql")
    lines = [line.rstrip() for line in (await shell("list")).out.splitlines()]
    assert lines[1].startswith("sql@1") and lines[1].endswith("canary sql@2 gets 5 %; pinned")
    assert lines[2].startswith("staged@1") and lines[2].endswith("no live version")
    assert "staged; no live version\n" in (await shell("show", "staged")).out


async def test_json_is_what_the_server_says(shell: Shell) -> None:
    await shell.upload(1)
    await shell.upload(2, "--no-promote")
    for arguments, part in (
        (("canary", "sql", "2", "--percent", "2.5"), {"canary": {"version": 2, "percent": 2.5}}),
        (("promote", "sql"), {"live": 2, "canary": None}),
        (("rollback", "sql"), {"live": 1}),
        (("pin", "sql"), {"pinned": True}),
        (("grant", "sql", "globex"), {"granted": True, "tenant": "globex", "id": "acme/sql"}),
        (("revoke", "sql", "globex"), {"granted": False}),
        (("history", "sql"), {"object": "list"}),
        (("diff", "sql", "1", "2"), {"object": "adapter.diff"}),
        (("rename", "sql", "new"), {"name": "new"}),
    ):
        done = await shell(*arguments, "--json")
        assert done.exit_code == 0 and json.loads(done.out).items() >= part.items(), done


async def test_failures_have_their_exit_codes(shell: Shell) -> None:
    await shell.upload(1)
    missing = "There is no adapter 'nope"
    for arguments in (
        ("promote", "nope"),
        ("rollback", "nope"),
        ("canary", "nope", "--off"),
        ("pin", "nope"),
        ("unpin", "nope"),
        ("history", "nope"),
        ("rename", "nope", "new"),
        ("grant", "nope", "globex"),
        ("revoke", "nope", "globex"),
        ("download", "nope"),
        ("diff", "nope", "1"),
    ):
        await fails(shell, *arguments, exit_code=5, err=missing)
    await fails(shell, "promote", "sql", "7", exit_code=5, err="There is no adapter 'sql@7'.")
    await fails(shell, "rollback", "sql", exit_code=1, err="Promote the version that you want.")
    await fails(shell, "canary", "sql", "1", "--percent", "5", exit_code=1, err="sql@1 is the live version")
    await fails(shell, "canary", "sql", "1", exit_code=2, err="--percent")
    await fails(shell, "canary", "sql", "1", "--off", exit_code=2, err="--off takes neither")
    await fails(shell, "delete", "sql@1", "-y", exit_code=1, err="Promote another version first")
    await fails(shell, "delete", "sql@x", "-y", exit_code=2, err="sql@1")
    await fails(shell, "rename", "sql", "NO", exit_code=2, err="is not allowed")
    assert (await shell("promote", "sql", "zero")).exit_code == 2
    assert (await shell("promote", "sql", key="lpx_wrong")).exit_code == 4


async def test_a_difference(shell: Shell) -> None:
    await shell.upload(1)
    folder = shell.adapter(2, lora_alpha=16)
    assert (await shell("upload", folder, "--name", "sql")).exit_code == 0
    out = (await shell("diff", "sql", "1")).out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert lines["scales"] == ["2.0", "4.0"]
    assert lines["norm"][-3:] == ["sql@1", "sql@2", "between"]
    assert float(lines["q_proj"][2]) > float(lines["q_proj"][0]) > 0
    await says(shell, "diff", "sql", "1", "1", out="sql@1 and sql@1 are the same adapter\n")


async def test_a_download_is_what_was_uploaded(shell: Shell) -> None:
    await shell.upload(1)
    await shell.upload(2)
    for ref, target, seed in (("sql", None, 2), ("sql@1", "first", 1)):
        done = await shell("download", ref, *([target] if target else []))
        assert done.exit_code == 0 and done.out.startswith(f"sql@{seed}: 2 files, "), done
        written = shell.folder / (target or "sql")
        assert {file.name: file.read_bytes() for file in written.iterdir()} == adapter_files(seed=seed)
    again = await shell("download", "sql", "first")
    assert (again.exit_code, "not an empty folder" in again.err) == (2, True)
    (shell.folder / "empty").mkdir()
    assert (await shell("download", "sql", "empty")).exit_code == 0
    (shell.folder / "file").write_text("")
    await fails(shell, "download", "sql", "file/sql", exit_code=1, err="Cannot write to file/sql: ")
    await fails(shell, "download", "sql@9", "none", exit_code=5, err="There is no adapter 'sql@9'.")


async def test_a_damaged_download_leaves_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    await shell.upload(1)
    chunks = shell.plane.services.store.chunks
    with monkeypatch.context() as on_the_way:
        on_the_way.setattr(
            shell.plane.services.store, "chunks", lambda *args: (piece.swapcase() for piece in chunks(*args))
        )
        await fails(shell, "download", "sql", "here", exit_code=1, err="not what its digest says (adapter_")
    [weights] = shell.plane.store.glob("sha256/*/*/adapter_model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    await fails(shell, "download", "sql", "here", exit_code=1, err="cannot be read")
    manifest = weights.with_name("manifest.json")
    told = json.loads(manifest.read_text())
    told["files"][weights.name]["sha256"] = sha256_of(weights)
    manifest.write_text(json.dumps(told))
    await fails(shell, "download", "sql", "here", exit_code=1, err="not what its digest says")
    assert [path.name for path in shell.folder.iterdir()] == ["adapter-1"]


async def test_a_blob_of_before_files_were_listed_is_downloaded(shell: Shell) -> None:
    await shell.upload(1)
    [manifest] = shell.plane.store.glob("sha256/*/*/manifest.json")
    told = json.loads(manifest.read_text())
    del told["files"]
    manifest.write_text(json.dumps(told))
    done = await shell("download", "sql", "--json")
    assert done.exit_code == 0 and json.loads(done.out)["adapter"]["digest_format"] == 1
    written = {file.name: file.read_bytes() for file in (shell.folder / "sql").iterdir()}
    assert written == adapter_files(seed=1)
    assert shell.plane.leftovers() == []


async def test_files_that_the_store_has_lost(shell: Shell) -> None:
    await shell.upload(1)
    await shell.upload(2)
    for blob in shell.plane.blobs():
        (shell.plane.store / "sha256" / blob[:2] / blob / "manifest.json").unlink()
    await fails(shell, "download", "sql", exit_code=1, err="cannot be read")
    await fails(shell, "diff", "sql", "1", exit_code=1, err="cannot be read")


def test_each_verb_is_there_and_says_what_it_does() -> None:
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    verbs = {
        "promote",
        "rollback",
        "history",
        "diff",
        "pin",
        "unpin",
        "rename",
        "grant",
        "revoke",
        "download",
    }
    assert verbs | {"canary", "upload", "list", "show", "delete", "check"} <= set(command.commands)
    assert all(verb.help for verb in command.commands.values())
