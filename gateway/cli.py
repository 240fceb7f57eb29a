"""The `loraplex` command. Each subcommand is a module of gateway/commands, imported when it runs."""

from __future__ import annotations

import sys

import typer

from gateway.commands import audit, engine, gateway, health, keys, tenants, up, usage
from gateway.commands.exits import CommandFailed

_EXIT_CODES = (
    "Exit codes: 0 done; 1 refused or failed; 2 wrong usage; 3 the server cannot be reached; "
    "4 the key is not accepted; 5 there is no such thing."
)

app = typer.Typer(
    name="loraplex",
    help=(
        "Serve many LoRA fine-tunes of one base model to many tenants.\n\n"
        "Start everything on this machine with `loraplex up`, make a tenant and a key with "
        "`loraplex tenants create` and `loraplex keys create`, and upload a fine-tune with `adapters upload`."
    ),
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("up")(up.up)
app.command("gateway")(gateway.gateway)
app.command("engine", context_settings=engine.PASS_ALL, add_help_option=False)(engine.engine)
app.command("health")(health.health)
app.command("usage")(usage.usage)
app.command("audit")(audit.audit)
app.add_typer(tenants.app, name="tenants", epilog=_EXIT_CODES)
app.add_typer(keys.app, name="keys", epilog=_EXIT_CODES)
for _group in (app, tenants.app, keys.app):
    for _command in _group.registered_commands:
        _command.epilog = _EXIT_CODES


def main() -> None:
    """Runs the command line, and turns a failure into one line on stderr and its exit code."""
    try:
        app()
    except CommandFailed as failure:
        typer.echo(f"error: {failure}", err=True)
        sys.exit(failure.exit_code)
