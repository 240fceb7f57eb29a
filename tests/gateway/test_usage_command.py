"""`loraplex usage` against a real gateway: whose key shows what, in which form and at which prices."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.commands.exits import Exit
from tests.gateway.control_plane import OPERATOR_KEY, ControlPlane, control_plane
from tests.gateway.test_cli import loraplex
from tests.gateway.test_prices import LIST, written
from tests.gateway.test_usage import OPERATOR, TENANTS, entries, get, settle


@pytest.fixture
async def plane(valkey_url: str, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with control_plane(valkey_url, tmp_path) as plane:
        yield plane


async def test_a_table_has_a_row_for_each_and_their_total(plane: ControlPlane) -> None:
    made = entries(50)
    await settle(plane.services.redis, made)
    server = {"LORAPLEX_URL": plane.url, "LORAPLEX_API_KEY": OPERATOR_KEY}
    code, out, err = await loraplex("usage", **server)
    assert (code, err) == (Exit.OK, "")
    period, headings, *rows = [line.split() for line in out.splitlines()]
    assert period[1] == "to" and headings[0] == "tenant"
    assert [row[0] for row in rows] == [*sorted(TENANTS), "total"]
    figures = [[int(figure.replace(",", "")) for figure in row[1:]] for row in rows]
    assert figures[-1] == [sum(column) for column in zip(*figures[:-1], strict=True)]
    assert figures[-1][0] == len(made)
    _, of_one, _ = await loraplex("usage", "--tenant", "acme", "--by", "adapter", **server)
    assert "(base model)" in of_one


async def test_a_tenants_key_shows_its_own(plane: ControlPlane) -> None:
    headers = await plane.tenant("acme")
    await settle(plane.services.redis, entries(50))
    server = {"LORAPLEX_URL": plane.url, "LORAPLEX_API_KEY": headers["Authorization"].removeprefix("Bearer ")}
    code, out, _ = await loraplex("usage", "--json", "--by", "adapter", "--by", "key", **server)
    assert (code, json.loads(out)) == (
        Exit.OK,
        await get(plane, "/v1/usage", headers, group_by=["adapter", "key"]),
    )
    _, out, _ = await loraplex("usage", "--csv", **server)
    rows = list(csv.DictReader(io.StringIO(out, newline="")))
    by_day = await get(plane, "/v1/usage", headers)
    assert [row["day"] for row in rows] == [row["day"] for row in by_day["data"]]
    code, _, err = await loraplex("usage", "--tenant", "globex", **server)
    assert (code, err) == (Exit.NOT_AUTHORISED, "error: This API key has no scope 'admin'.\n")
    uploader = (await plane.tenant("acme", "adapters"))["Authorization"].removeprefix("Bearer ")
    code, _, err = await loraplex("usage", **server | {"LORAPLEX_API_KEY": uploader})
    assert (code, err) == (Exit.NOT_AUTHORISED, "error: This API key has no scope 'inference'.\n")


async def test_prices_of_a_file_cost_the_same_as_the_gateways(valkey_url: str, tmp_path: Path) -> None:
    prices = written(tmp_path, LIST)
    made = entries(50)
    async with control_plane(valkey_url, tmp_path, prices=prices) as plane:
        await settle(plane.services.redis, made)
        expected = await get(plane, "/admin/usage", OPERATOR, group_by="day")
    async with control_plane(valkey_url, tmp_path) as plane:
        assert "cost" not in (await get(plane, "/admin/usage", OPERATOR))["total"]
        server = {"LORAPLEX_URL": plane.url, "LORAPLEX_API_KEY": OPERATOR_KEY}
        code, out, _ = await loraplex("usage", "--prices", str(prices), "--by", "day", "--json", **server)
        assert (code, json.loads(out)) == (Exit.OK, expected)
        assert Decimal(expected["total"]["cost"]) > 0
        bad = written(tmp_path, "currency = 1", "bad.toml")
        code, _, err = await loraplex("usage", "--prices", str(bad), **server)
        assert code == Exit.USAGE and f"error: The price list {bad} is wrong: " in err


@pytest.mark.parametrize(
    ("arguments", "key", "code", "complaint"),
    [
        (["--csv", "--json"], OPERATOR_KEY, Exit.USAGE, "Choose one of --json and --csv."),
        ([], "lpx_0_0", Exit.NOT_AUTHORISED, "The API key is not valid."),
        ([], "", Exit.USAGE, "Give a tenant's key, or the operator's, with --api-key or LORAPLEX_API_KEY."),
        (["--tenant", "nobody"], OPERATOR_KEY, Exit.NOT_FOUND, "There is no tenant 'nobody'."),
        (["--since", "yesterday"], OPERATOR_KEY, Exit.REFUSED, "'since'"),
    ],
)
async def test_failures_are_one_line(
    plane: ControlPlane, arguments: list[str], key: str, code: Exit, complaint: str
) -> None:
    found, out, err = await loraplex("usage", *arguments, LORAPLEX_URL=plane.url, LORAPLEX_API_KEY=key)
    assert (found, out) == (code, "")
    assert err.startswith("error: ") and complaint in err and err.count("\n") == 1
