"""`loraplex tenants`: the customers of a gateway."""

from __future__ import annotations

from enum import StrEnum
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
    show_fields,
    show_json,
    show_table,
)
from gateway.commands.exits import CommandFailed, Exit
from gateway.commands.limit_options import (
    AdapterRates,
    Limits,
    describe_limits,
    parse_adapter_limits,
    parse_limits,
)
from gateway.limits import TENANT_LIMIT_NAMES

app = typer.Typer(
    help="Create, list, change, suspend and delete tenants: each has keys and adapters of its own.",
    no_args_is_help=True,
)

TenantId = Annotated[str, typer.Argument(help="Id of the tenant.", show_default=False)]
BaseModels = Annotated[
    list[str] | None,
    typer.Option("--base-model", help="A base model that it may use, instead of all. Repeatable."),
]


class Prefixes(StrEnum):
    """With whom cached prefixes are shared."""

    PRIVATE = "private"
    SHARED = "shared"


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Name for people, such as 'Acme Ltd'.", show_default=False)],
    tenant_id: Annotated[
        str | None,
        typer.Option("--id", help="Id for programs; without it the name's, 'acme-ltd' for 'Acme Ltd'."),
    ] = None,
    weight: Annotated[
        float,
        typer.Option(
            callback=quantity, help="Share of an engine's time when several tenants have work waiting."
        ),
    ] = 1.0,
    shared_prefixes: Annotated[
        bool, typer.Option("--shared-prefixes", help="Share cached prefixes with others that have this flag.")
    ] = False,
    max_pinned_adapters: Annotated[
        int | None, typer.Option(help="How many adapters it may keep in the engines' memory. Default 2.")
    ] = None,
    limit: Limits = None,
    base_model: BaseModels = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Create a tenant. It has no key yet: see `loraplex keys create`."""
    body: dict[str, Any] = {"name": name, "weight": weight}
    body["prefix_sharing"] = "shared" if shared_prefixes else "private"
    body["limits"] = parse_limits(limit or [], TENANT_LIMIT_NAMES)
    if tenant_id is not None:
        body["id"] = tenant_id
    if max_pinned_adapters is not None:
        body["max_pinned_adapters"] = max_pinned_adapters
    if base_model:
        body["base_models"] = base_model
    tenant = AdminClient(url, api_key).call("POST", "/tenants", body)
    show_json(tenant) if as_json else typer.echo(f"created tenant {tenant['id']}")
    if tenant_id is None:
        _tell_of_another(name, tenant["id"])


def _tell_of_another(name: str, tenant_id: str) -> None:
    """Says so where a tenant has not the id of its name: who makes one twice may take it for the first."""
    from gateway.tenants import id_made_of

    wanted = id_made_of(name)
    if wanted not in ("", tenant_id):
        typer.echo(
            f"warning: The id '{wanted}' is or was another tenant's, so this one has '{tenant_id}'. If you "
            f"meant that tenant, undo this with: loraplex tenants delete {tenant_id}",
            err=True,
        )


@app.command("list")
def list_tenants(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List all tenants, oldest first."""
    answer = AdminClient(url, api_key).call("GET", "/tenants")
    if as_json:
        show_json(answer)
    else:
        show_table(("id", "name", "weight", "prefixes", "state"), [_row(tenant) for tenant in answer["data"]])


@app.command("show")
def show(tenant_id: TenantId, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Show one tenant with its limits, those of single adapters included."""
    tenant = AdminClient(url, api_key).call("GET", f"/tenants/{quoted(tenant_id)}")
    show_json(tenant) if as_json else show_fields(_fields(tenant))


@app.command("update")
def update(
    tenant_id: TenantId,
    name: Annotated[str | None, typer.Option(help="Name for people.")] = None,
    weight: Annotated[
        float | None, typer.Option(callback=quantity, help="Share of an engine's time.")
    ] = None,
    prefixes: Annotated[Prefixes | None, typer.Option(help="With whom cached prefixes are shared.")] = None,
    max_pinned_adapters: Annotated[
        int | None, typer.Option(help="How many adapters it may keep in the engines' memory.")
    ] = None,
    limit: Limits = None,
    adapter_limit: AdapterRates = None,
    base_model: BaseModels = None,
    any_base_model: Annotated[
        bool, typer.Option("--any-base-model", help="Let it use all base models.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Change what is given and leave the rest. Every gateway follows within a second."""
    if base_model and any_base_model:
        raise CommandFailed("Give either --base-model or --any-base-model, not both.", Exit.USAGE)
    given = {
        "name": name,
        "weight": weight,
        "prefix_sharing": prefixes.value if prefixes else None,
        "max_pinned_adapters": max_pinned_adapters,
        "limits": parse_limits(limit, TENANT_LIMIT_NAMES) if limit else None,
        "adapter_limits": parse_adapter_limits(adapter_limit) if adapter_limit else None,
        "base_models": base_model or None,
    }
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if any_base_model:
        changes["base_models"] = None
    if not changes:
        raise CommandFailed("Nothing to change is given. See `loraplex tenants update --help`.", Exit.USAGE)
    tenant = AdminClient(url, api_key).call("PATCH", f"/tenants/{quoted(tenant_id)}", changes)
    show_json(tenant) if as_json else show_fields(_fields(tenant))


@app.command("suspend")
def suspend(
    tenant_id: TenantId, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False
) -> None:
    """Refuse all keys of a tenant, within a second, until it is resumed. Nothing is deleted."""
    tenant = AdminClient(url, api_key).call("PATCH", f"/tenants/{quoted(tenant_id)}", {"suspended": True})
    show_json(tenant) if as_json else typer.echo(f"suspended tenant {tenant_id}")


@app.command("resume")
def resume(
    tenant_id: TenantId, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False
) -> None:
    """Let a suspended tenant's keys work again."""
    tenant = AdminClient(url, api_key).call("PATCH", f"/tenants/{quoted(tenant_id)}", {"suspended": False})
    show_json(tenant) if as_json else typer.echo(f"resumed tenant {tenant_id}")


@app.command("delete")
def delete(
    tenant_id: TenantId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would go, and delete nothing.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Delete a tenant, with all its keys and adapters. What that is comes first, then the question."""
    client, path = AdminClient(url, api_key), f"/tenants/{quoted(tenant_id)}"
    if dry_run or not yes:
        doomed = client.call("DELETE", f"{path}?dry_run=true")
        if dry_run and as_json:
            show_json(doomed)
            return
        for line in _doom(doomed):
            typer.echo(line, err=not dry_run)
        if dry_run:
            return
        typer.confirm(f"Delete tenant '{tenant_id}' with all of this?", abort=True, err=True)
    answer = client.call("DELETE", path)
    if as_json:
        show_json(answer)
        return
    adapters = ", ".join(answer["adapters"]) or "none"
    typer.echo(f"deleted tenant {tenant_id}, its {len(answer['keys'])} keys, and its adapters: {adapters}")


def _doom(doomed: dict[str, Any]) -> list[str]:
    """What goes with a tenant, a line each."""
    lines = [f"tenant {doomed['id']} has {len(doomed['keys'])} keys: {', '.join(doomed['keys']) or 'none'}"]
    lines.append(f"it has {len(doomed['adapters'])} adapters, of {doomed['bytes']:,} bytes")
    for adapter in doomed["adapters"]:
        versions = ", ".join(str(version) for version in adapter["versions"])
        line = f"  {adapter['name']}: versions {versions}"
        if adapter["live"] is not None:
            line += f"; {adapter['live']} is live"
        if adapter["pinned"]:
            line += "; pinned"
        if adapter["grants"]:
            line += f"; granted to {', '.join(adapter['grants'])}, who can no longer use it"
        lines.append(line)
    lines.append(f"it has {doomed['files']} files of batches, of {doomed['file_bytes']:,} bytes")
    if doomed["batches"]:
        lines.append(f"batches of it that have not ended: {', '.join(doomed['batches'])}")
    if doomed["granted"]:
        lines.append(f"it may no longer use what others granted it: {', '.join(doomed['granted'])}")
    return lines


def _row(tenant: dict[str, Any]) -> tuple[str, ...]:
    return (
        tenant["id"],
        tenant["name"],
        f"{tenant['weight']:g}",
        tenant["prefix_sharing"],
        _state(tenant),
    )


def _state(tenant: dict[str, Any]) -> str:
    return "suspended" if tenant["suspended"] else "active"


def _fields(tenant: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """A tenant's properties, each with its lines."""
    bases = tenant["base_models"]
    fields = [
        ("id", [tenant["id"]]),
        ("name", [tenant["name"]]),
        ("state", [_state(tenant)]),
        ("weight", [f"{tenant['weight']:g}"]),
        ("prefixes", [tenant["prefix_sharing"]]),
        ("base models", ["all"] if bases is None else bases or ["none"]),
        ("pinned adapters", [f"at most {tenant['max_pinned_adapters']:,}"]),
        ("limits", describe_limits(tenant["limits"]) or ["none"]),
    ]
    for name, rates in sorted(tenant["adapter_limits"].items()):
        fields.append((f"limits of {name}", describe_limits(rates)))
    return fields
