"""`loraplex health`: asks one process whether it serves; made for containers' health checks."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from gateway.commands.admin_client import DEFAULT_URL
from gateway.commands.exits import CommandFailed, Exit


def health(
    engine: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of an engine to ask, in place of a gateway.", show_default=False),
    ] = None,
    url: Annotated[str, typer.Option(envvar="LORAPLEX_URL", help="Base URL of a gateway.")] = DEFAULT_URL,
) -> None:
    """Ask whether a gateway, or an engine, can answer requests. Exits with 0 if so and with 3 if not."""
    from gateway import probes

    if engine is None:
        where, check = url, probes.gateway_ready(url.rstrip("/").removesuffix("/v1"))
    else:
        where, check = engine, probes.engine_serves(engine)
    if not asyncio.run(check):
        raise CommandFailed(f"{where} is not ready.", Exit.UNREACHABLE)
    typer.echo(f"{where} is ready")
