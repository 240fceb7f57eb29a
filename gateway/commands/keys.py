"""`loraplex keys`: the API keys of tenants."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from adapters.commands.quantities import quantity
from gateway.commands.admin_client import (
    DEFAULT_URL,
    AdminClient,
    ApiKey,
    AsJson,
    Url,
    quoted,
    show_json,
    show_table,
)
from gateway.commands.limit_options import Rates, describe_limits, parse_limits
from gateway.limits import RATE_NAMES

app = typer.Typer(help="Create, list, rotate and revoke the API keys of tenants.", no_args_is_help=True)

TenantId = Annotated[str, typer.Argument(help="Id of the tenant.", show_default=False)]
KeyId = Annotated[str, typer.Argument(help="Id of the key, as `list` shows it.", show_default=False)]
_DAY_S = 86_400


@app.command("create")
def create(
    tenant_id: TenantId,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What it may do: inference, adapters, admin. Repeatable; the first two when not given."
        ),
    ] = None,
    expires_in_days: Annotated[
        float | None, typer.Option(callback=quantity, help="Days until it stops; never when not given.")
    ] = None,
    note: Annotated[str, typer.Option(help="What it is for, shown in lists.")] = "",
    limit: Rates = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Create a key and print it, this once: only a digest of it is stored.

    Alone on stdout, so that a script may write `KEY=$(loraplex keys create acme)`.
    """
    body: dict[str, Any] = {"note": note, "limits": parse_limits(limit or [], RATE_NAMES)}
    if scope:
        body["scopes"] = scope
    if expires_in_days is not None:
        body["expires_in"] = int(expires_in_days * _DAY_S)
    key = AdminClient(url, api_key).call("POST", f"/tenants/{quoted(tenant_id)}/keys", body)
    show_json(key) if as_json else typer.echo(key["key"])


@app.command("list")
def list_keys(
    tenant_id: TenantId, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False
) -> None:
    """List a tenant's keys, without their secrets."""
    answer = AdminClient(url, api_key).call("GET", f"/tenants/{quoted(tenant_id)}/keys")
    if as_json:
        show_json(answer)
    else:
        columns = ("id", "scopes", "created", "expires", "limits", "note")
        show_table(columns, [_row(key) for key in answer["data"]])


@app.command("rotate")
def rotate(
    tenant_id: TenantId,
    key_id: KeyId,
    grace: Annotated[
        int, typer.Option(min=0, help="For how many seconds the old key still works; 0: it stops at once.")
    ] = 0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Replace a key by one with the same scopes, limits, note and lifetime, and print it, this once."""
    path = f"/tenants/{quoted(tenant_id)}/keys/{quoted(key_id)}/rotate"
    key = AdminClient(url, api_key).call("POST", path, {"grace": grace})
    show_json(key) if as_json else typer.echo(key["key"])


@app.command("revoke")
def revoke(
    tenant_id: TenantId,
    key_id: KeyId,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Revoke a key. It stops on every gateway within a second."""
    answer = AdminClient(url, api_key).call("DELETE", f"/tenants/{quoted(tenant_id)}/keys/{quoted(key_id)}")
    show_json(answer) if as_json else typer.echo(f"revoked key {key_id}")


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    expires = "expired" if key["expired"] else _day(key["expires"]) if key["expires"] else "never"
    limits = ", ".join(describe_limits(key["limits"])) or "none"
    return (key["id"], " ".join(key["scopes"]), _day(key["created"]), expires, limits, key["note"])


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
