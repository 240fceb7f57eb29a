"""`loraplex tenants`, `keys` and `audit` as a user types them, against a real gateway."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.commands.exits import CommandFailed, Exit
from tests.gateway.control_plane import OPERATOR_KEY, ControlPlane, adapter_files, control_plane


@pytest.fixture
async def plane(valkey_url: str, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with control_plane(valkey_url, tmp_path) as plane:
        yield plane


async def loraplex(
    plane: ControlPlane, *arguments: str, key: str = OPERATOR_KEY, typed: str | None = None
) -> tuple[int, str, str]:
    """Returns exit code, stdout, and stderr with what the command line prints of a failure."""
    variables: Mapping[str, str] = {"LORAPLEX_URL": plane.url, "LORAPLEX_API_KEY": key, "COLUMNS": "200"}
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, input=typed, env=variables)
    if isinstance(result.exception, CommandFailed):
        return result.exception.exit_code, result.stdout, f"{result.stderr}{result.exception}"
    return result.exit_code, result.stdout, result.stderr


async def done(plane: ControlPlane, *arguments: str, key: str = OPERATOR_KEY) -> str:
    """What a command that succeeds prints."""
    code, out, err = await loraplex(plane, *arguments, key=key)
    assert code == Exit.OK, err
    return out


async def test_a_second_tenant_of_a_name_is_told_from_the_first(plane: ControlPlane) -> None:
    assert await loraplex(plane, "tenants", "create", "Acme") == (Exit.OK, "created tenant acme\n", "")
    code, out, err = await loraplex(plane, "tenants", "create", "Acme")
    other = out.removeprefix("created tenant ").strip()
    assert code == Exit.OK and other.startswith("t-")
    assert f"The id 'acme' is or was another tenant's, so this one has '{other}'." in err
    assert err.count("\n") == 1 and f"loraplex tenants delete {other}" in err
    code, out, err = await loraplex(plane, "tenants", "create", "Acme", "--id", "acme")
    assert (code, out) == (Exit.REFUSED, "") and "There is a tenant 'acme' already." in err
    code, out, err = await loraplex(plane, "tenants", "create", "株式会社", "--json")
    assert json.loads(out)["id"].startswith("t-") and err == "", "no other tenant has taken that name's id"


async def test_a_tenant_is_changed_option_by_option(plane: ControlPlane) -> None:
    limits = ("--limit", "requests_per_minute=600", "--limit", "tokens_per_month=2M")
    await done(plane, "tenants", "create", "Acme", *limits, "--base-model", "base")
    shown = await done(plane, "tenants", "show", "acme")
    assert "requests_per_minute 600\n" in shown and "tokens_per_month 2,000,000\n" in shown
    assert "base models      base\n" in shown and "state            active\n" in shown
    options = (
        "--weight",
        "2",
        "--prefixes",
        "shared",
        "--limit",
        "tokens_per_month=none",
        "--any-base-model",
    )
    adapter = (
        "--adapter-limit",
        "sql:requests_per_minute=60",
        "--adapter-limit",
        "sql:concurrent_requests=1",
    )
    await done(plane, "tenants", "update", "acme", *options, *adapter)
    tenant = json.loads(await done(plane, "tenants", "show", "acme", "--json"))
    assert (tenant["weight"], tenant["prefix_sharing"], tenant["base_models"]) == (2, "shared", None)
    assert tenant["limits"]["tokens_per_month"] is None and tenant["limits"]["requests_per_minute"] == 600
    shown = await done(plane, "tenants", "show", "acme")
    assert "limits of sql    requests_per_minute 60\n                 concurrent_requests 1\n" in shown
    await done(plane, "tenants", "update", "acme", "--adapter-limit", "sql:none")
    assert "limits of sql" not in await done(plane, "tenants", "show", "acme")
    assert await done(plane, "tenants", "suspend", "acme") == "suspended tenant acme\n"
    assert "suspended" in await done(plane, "tenants", "list")
    assert await done(plane, "tenants", "resume", "acme") == "resumed tenant acme\n"
    assert "suspended" not in await done(plane, "tenants", "list")


async def test_deleting_says_what_goes_and_asks(plane: ControlPlane) -> None:
    acme = await plane.tenant("acme")
    await plane.upload(acme, adapter_files())
    await plane.client.put("/v1/adapters/sql/grants/other", headers=acme)
    said = "  sql: versions 1; 1 is live; granted to other, who can no longer use it\n"
    code, out, err = await loraplex(plane, "tenants", "delete", "acme", typed="n\n")
    assert code != Exit.OK and out.strip() == "n" and said in err
    assert said in await done(plane, "tenants", "delete", "acme", "--dry-run")
    doomed = json.loads(await done(plane, "tenants", "delete", "acme", "--dry-run", "--json"))
    assert doomed["object"] == "tenant.deletion"
    assert (await plane.client.get("/v1/adapters", headers=acme)).status_code == 200
    code, out, err = await loraplex(plane, "tenants", "delete", "acme", typed="y\n")
    assert code == Exit.OK and out.endswith("deleted tenant acme, its 1 keys, and its adapters: sql\n")


async def test_keys_have_limits_and_are_rotated(plane: ControlPlane) -> None:
    await done(plane, "tenants", "create", "acme")
    limit = ("--limit", "requests_per_minute=5")
    key = (await done(plane, "keys", "create", "acme", "--scope", "adapters", *limit)).strip()
    key_id = key.split("_")[1]
    assert "requests_per_minute 5" in await done(plane, "keys", "list", "acme")
    new = (await done(plane, "keys", "rotate", "acme", key_id, "--grace", "600")).strip()
    for each in (key, new):
        headers = {"Authorization": f"Bearer {each}"}
        assert (await plane.client.get("/v1/adapters", headers=headers)).status_code == 200
    assert (await done(plane, "keys", "list", "acme")).count("requests_per_minute 5") == 2


async def test_names_and_notes_cannot_command_the_terminal(plane: ControlPlane) -> None:
    commands = "é🙂\x1b[31m\x07\x9b2J\x7f\r\n\t[bold]"
    harmless = "é🙂\ufffd[31m\ufffd\ufffd2J\ufffd\ufffd\ufffd\ufffd[bold]"
    await done(plane, "tenants", "create", commands, "--id", "acme")
    await done(plane, "keys", "create", "acme", "--note", commands)
    for shown in (
        await done(plane, "tenants", "list"),
        await done(plane, "tenants", "show", "acme"),
        await done(plane, "keys", "list", "acme"),
    ):
        assert harmless in shown
        assert not any(unicodedata.category(each) == "Cc" for each in shown.replace("\n", ""))
    tenant = json.loads(await done(plane, "tenants", "show", "acme", "--json"))
    assert tenant["name"] == commands


NO_SEGMENTS = [
    ("tenants", "show"),
    ("tenants", "update", "--weight", "2"),
    ("tenants", "suspend"),
    ("tenants", "resume"),
    ("tenants", "delete", "--yes"),
    ("keys", "create"),
    ("keys", "list"),
    ("keys", "rotate", "acme"),
    ("keys", "revoke", "acme"),
]


async def test_an_id_that_makes_another_path_is_not_sent(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme = await plane.tenant("acme")
    await plane.upload(acme, adapter_files())
    sent: list[str] = []
    send = httpx.request

    def request(method: str, url: str, **more: Any) -> httpx.Response:
        sent.append(f"{method} {url}")
        return send(method, url, **more)

    monkeypatch.setattr(httpx, "request", request)
    for odd in ("..", ".", "", "acme/keys", "../acme"):
        for command in NO_SEGMENTS:
            code, out, err = await loraplex(plane, *command, odd)
            assert (code, out, err) == (
                Exit.USAGE,
                "",
                f"'{odd}' is no name or id; write one as it is listed.",
            )
    assert sent == []
    await done(plane, "tenants", "show", "acme")
    assert (await plane.client.get("/v1/adapters/sql", headers=acme)).status_code == 200


async def test_the_audit_is_a_table_or_json(plane: ControlPlane) -> None:
    await done(plane, "tenants", "create", "Acme")
    await done(plane, "tenants", "update", "acme", "--weight", "2")
    key = (await done(plane, "keys", "create", "acme", "--scope", "admin")).strip()
    table = await done(plane, "audit")
    assert table.index("key.create") < table.index("tenant.update") < table.index("tenant.create")
    assert "weight: 1.0 → 2.0" in table and "operator, 127.0.0.1" in table and key not in table
    listed = json.loads(await done(plane, "audit", "--json", "--limit", "2", "--since", "1h"))
    assert [entry["action"] for entry in listed["data"]] == ["key.create", "tenant.update"]
    assert "tenant.update" not in await done(plane, "audit", "--action", "key.")
    assert "acme" not in await done(plane, "audit", "--until", "2026-01-01")
    assert "acme" not in await done(plane, "audit", "--tenant", "other")
    own = await done(plane, "audit", key=key)
    assert "tenant.create" in own and "127.0.0.1" not in own


async def test_a_row_that_is_piped_is_one_line(plane: ControlPlane) -> None:
    await done(plane, "tenants", "create", "Acme", "--id", "a" * 63)
    await done(plane, "keys", "create", "a" * 63, "--note", "n" * 200)
    variables = {"LORAPLEX_URL": plane.url, "LORAPLEX_API_KEY": OPERATOR_KEY, "COLUMNS": "40"}
    for command in (["audit"], ["keys", "list", "a" * 63]):
        result = await asyncio.to_thread(CliRunner().invoke, app, command, env=variables)
        assert any("n" * 200 in line for line in result.stdout.splitlines()), result.stdout


async def test_a_long_audit_is_read_page_by_page(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.commands.audit._PAGE", 2)
    for n in range(5):
        await plane.services.tenants.create(f"tenant-{n}")
    listed = json.loads(await done(plane, "audit", "--json"))
    assert [entry["target"] for entry in listed["data"]] == [f"tenant-{n}" for n in (4, 3, 2, 1, 0)]


WRONG = [
    ("tenants create x --limit rpm=5", Exit.USAGE, "There is no limit 'rpm'. Limits are requests_per_minute"),
    ("tenants create x --limit adapters", Exit.USAGE, "'adapters' has no number."),
    ("tenants update acme", Exit.USAGE, "Nothing to change is given."),
    ("tenants update acme --adapter-limit sql", Exit.USAGE, "'sql' names no adapter."),
    ("tenants update acme --limit adapters=-1", Exit.USAGE, "'adapters=-1' has no number."),
    ("tenants update acme --limit concurrent_requests=0", Exit.REFUSED, "limits.concurrent_requests"),
    ("tenants update nobody --weight 2", Exit.NOT_FOUND, "There is no tenant 'nobody'."),
    ("tenants suspend nobody", Exit.NOT_FOUND, "There is no tenant 'nobody'."),
    ("tenants delete nobody", Exit.NOT_FOUND, "There is no tenant 'nobody'."),
    ("keys rotate acme 0", Exit.NOT_FOUND, "Tenant 'acme' has no key '0'."),
    ("keys create acme --limit adapters=1", Exit.USAGE, "There is no limit 'adapters'."),
    ("audit --since yesterday", Exit.USAGE, "'yesterday' is no time."),
]


async def test_what_is_wrong_is_said_in_one_sentence(plane: ControlPlane) -> None:
    await plane.services.tenants.create("acme")
    for line, code, message in WRONG:
        found = await loraplex(plane, *line.split())
        assert (found[0], found[1]) == (code, "") and message in found[2], line


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "1e305"])
def test_what_is_no_quantity_is_wrong_usage(number: str) -> None:
    variables = {"LORAPLEX_URL": "http://127.0.0.1:1", "LORAPLEX_API_KEY": OPERATOR_KEY, "COLUMNS": "200"}
    for line in (
        f"tenants create x --weight={number}",
        f"tenants update x --weight={number}",
        f"keys create acme --expires-in-days={number}",
    ):
        result = CliRunner().invoke(app, line.split(), env=variables)
        assert result.exit_code == Exit.USAGE and "is no quantity" in result.stderr, line
