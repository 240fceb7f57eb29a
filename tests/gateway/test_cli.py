"""The `loraplex` command against a real gateway: what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapters.client import Exit as AdaptersExit
from gateway.commands.exits import Exit
from tests.gateway.control_plane import OPERATOR_KEY, ControlPlane, control_plane


@pytest.fixture
async def plane(valkey_url: str, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with control_plane(valkey_url, tmp_path) as plane:
        yield plane


async def loraplex(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Runs the command in a process of its own. Returns exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments),
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_tenants_and_keys_from_first_to_last(plane: ControlPlane) -> None:
    server = {"LORAPLEX_URL": plane.url, "LORAPLEX_API_KEY": OPERATOR_KEY}
    options = ("--id", "acme", "--weight", "2", "--max-pinned-adapters", "3")
    assert await loraplex("tenants", "create", "Acme Ltd", *options, **server) == (
        Exit.OK,
        "created tenant acme\n",
        "",
    )
    assert (await plane.admin("GET", "/tenants/acme")).json()["max_pinned_adapters"] == 3
    code, out, _ = await loraplex("keys", "create", "acme", "--scope", "adapters", "--note", "ci", **server)
    key = out.strip()
    assert code == Exit.OK and key.startswith("lpx_")
    headers = {"Authorization": f"Bearer {key}"}
    assert (await plane.client.get("/v1/adapters", headers=headers)).status_code == 200
    _, table, _ = await loraplex("tenants", "list", **server)
    assert "Acme Ltd" in table and "private" in table
    _, listed, _ = await loraplex("keys", "list", "acme", "--json", **server)
    [record] = json.loads(listed)["data"]
    assert (record["scopes"], record["note"], record["expires"]) == (["adapters"], "ci", None)
    _, table, _ = await loraplex("keys", "list", "acme", **server)
    assert record["id"] in table and key not in table
    assert (await loraplex("keys", "revoke", "acme", record["id"], **server))[0] == Exit.OK
    assert (await plane.refusal(headers)).status_code == 401
    code, out, _ = await loraplex("tenants", "delete", "acme", "--yes", **server)
    assert (code, out) == (Exit.OK, "deleted tenant acme, its 0 keys, and its adapters: none\n")


async def test_each_failure_is_one_line_and_its_own_exit_code(plane: ControlPlane) -> None:
    operator = {"LORAPLEX_URL": plane.url, "LORAPLEX_API_KEY": OPERATOR_KEY}
    wrong = {"LORAPLEX_URL": plane.url, "LORAPLEX_API_KEY": "lpx_0_0"}
    away = {"LORAPLEX_URL": "http://127.0.0.1:1", "LORAPLEX_API_KEY": OPERATOR_KEY}
    page = {**operator, "LORAPLEX_URL": f"{plane.url}/docs?"}  # HTML, whatever follows
    odd = {**operator, "LORAPLEX_API_KEY": "lpx_\u201c"}
    cases = [
        (["tenants", "show", "nobody"], operator, Exit.NOT_FOUND, "There is no tenant 'nobody'."),
        (["tenants", "show", "../../v1/adapters"], operator, Exit.USAGE, "is no name or id"),
        (["tenants", "create", "Acme", "--id", "A B"], operator, Exit.REFUSED, "id"),
        (["keys", "create", "nobody"], operator, Exit.NOT_FOUND, "There is no tenant 'nobody'."),
        (["tenants", "list"], wrong, Exit.NOT_AUTHORISED, "The API key is not valid."),
        (["tenants", "list"], away, Exit.UNREACHABLE, "No gateway answers at http://127.0.0.1:1"),
        (["tenants", "list"], page, Exit.UNREACHABLE, "is not a Loraplex gateway."),
        (["tenants", "list"], odd, Exit.USAGE, "characters that no key has"),
        (["tenants", "list"], {}, Exit.USAGE, "LORAPLEX_API_KEY"),
        (["health", "--engine", "127.0.0.1:1"], {}, Exit.UNREACHABLE, "127.0.0.1:1 is not ready."),
        (["gateway", "--port", "70000"], {}, Exit.USAGE, "LORAPLEX_PORT"),
        (["gateway"], {"LORAPLEX_OPERATOR_KEY": "short"}, Exit.USAGE, "OPERATOR_KEY: it has fewer than 16"),
        (["gateway", "--redis-url", "localhost"], {}, Exit.USAGE, "as in redis://127.0.0.1:6379/0"),
        (["gateway", "--store", "/proc/store"], {}, Exit.REFUSED, "Choose another with --store."),
        (["up", "--model", "m", "--host", "192.0.2.1"], {}, Exit.REFUSED, "cannot be had on 192.0.2.1: "),
    ]
    results = await asyncio.gather(*(loraplex(*arguments, **env) for arguments, env, _, _ in cases))
    for (arguments, _, code, message), (got, out, err) in zip(cases, results, strict=True):
        assert got == code, (arguments, err)
        assert out == "" and message in err, arguments
        assert err.startswith("error: ") and err.count("\n") == 1, (arguments, err)
        assert OPERATOR_KEY not in err


async def test_help_tells_of_every_command(plane: ControlPlane) -> None:
    code, out, _ = await loraplex("--help")
    assert code == Exit.OK
    for command in ("up", "gateway", "engine", "tenants", "keys", "health"):
        assert f" {command} " in out


async def test_the_engines_own_help_is_shown() -> None:
    code, out, _ = await loraplex("engine", "--help")
    assert code == Exit.OK
    assert "--max-num-seqs" in out


def test_exit_codes_are_those_of_the_adapters_command() -> None:
    assert {code.name: code.value for code in Exit} == {code.name: code.value for code in AdaptersExit}
