"""Sharing: `adapters grant` and `revoke`."""

from __future__ import annotations

from typing import Annotated

import typer

from adapters.commands.shared import DEFAULT_URL, ApiKey, AsJson, Name, Url, connect, print_json
from adapters.identity import check_name

Tenant = Annotated[str, typer.Argument(help="Id of the other tenant.", show_default=False)]


def grant(
    name: Name, tenant: Tenant, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False
) -> None:
    """Let another tenant use an adapter, in all its versions. It calls it OWNER/NAME.

    The server does not say whether there is such a tenant: check the id.
    """
    check_name(name)
    with connect(url, api_key) as client:
        answer = client.of(name, "PUT", "grants", tenant)
    print_json(answer) if as_json else typer.echo(f"{tenant} may use {answer['id']}")


def revoke(
    name: Name, tenant: Tenant, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False
) -> None:
    """Take a grant back, from the next request on."""
    check_name(name)
    with connect(url, api_key) as client:
        answer = client.of(name, "DELETE", "grants", tenant)
    print_json(answer) if as_json else typer.echo(f"{tenant} may not use {answer['id']}")
