"""`loraplex tenants`: the customers of a gateway."""

from __future__ import annotations

from typing import Annotated, Any

import typer

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

app = typer.Typer(
    help="Create, list, show and delete tenants: each has keys and a name space of adapters of its own.",
    no_args_is_help=True,
)

TenantId = Annotated[str, typer.Argument(help="Id of the tenant.", show_default=False)]


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Name for people, such as 'Acme Ltd'.", show_default=False)],
    tenant_id: Annotated[
        str | None,
        typer.Option("--id", help="Id for programs; without it the name's, 'acme-ltd' for 'Acme Ltd'."),
    ] = None,
    weight: Annotated[
        float, typer.Option(help="Share of an engine's time when several tenants have work waiting.")
    ] = 1.0,
    shared_prefixes: Annotated[
        bool, typer.Option("--shared-prefixes", help="Share cached prefixes with others that have this flag.")
    ] = False,
    max_pinned_adapters: Annotated[
        int | None, typer.Option(help="How many adapters it may keep in the engines' memory. Default 2.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Create a tenant. It has no key yet: see `loraplex keys create`."""
    body: dict[str, Any] = {"name": name, "weight": weight}
    body["prefix_sharing"] = "shared" if shared_prefixes else "private"
    if tenant_id is not None:
        body["id"] = tenant_id
    if max_pinned_adapters is not None:
        body["max_pinned_adapters"] = max_pinned_adapters
    tenant = AdminClient(url, api_key).call("POST", "/tenants", body)
    show_json(tenant) if as_json else typer.echo(f"created tenant {tenant['id']}")


@app.command("list")
def list_tenants(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List all tenants, oldest first."""
    answer = AdminClient(url, api_key).call("GET", "/tenants")
    if as_json:
        show_json(answer)
    else:
        show_table(_COLUMNS, [_row(tenant) for tenant in answer["data"]])


@app.command("show")
def show(tenant_id: TenantId, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Show one tenant."""
    tenant = AdminClient(url, api_key).call("GET", f"/tenants/{quoted(tenant_id)}")
    show_json(tenant) if as_json else show_table(_COLUMNS, [_row(tenant)])


@app.command("delete")
def delete(
    tenant_id: TenantId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Delete a tenant, with all its keys and adapters."""
    if not yes:
        typer.confirm(f"Delete tenant '{tenant_id}' with all its keys and adapters?", abort=True, err=True)
    answer = AdminClient(url, api_key).call("DELETE", f"/tenants/{quoted(tenant_id)}")
    if as_json:
        show_json(answer)
        return
    adapters = ", ".join(answer["adapters"]) or "none"
    typer.echo(f"deleted tenant {tenant_id}, its {len(answer['keys'])} keys, and its adapters: {adapters}")


_COLUMNS = ("id", "name", "weight", "prefixes", "state")


def _row(tenant: dict[str, Any]) -> tuple[str, ...]:
    state = "suspended" if tenant["suspended"] else "active"
    return (tenant["id"], tenant["name"], f"{tenant['weight']:g}", tenant["prefix_sharing"], state)
