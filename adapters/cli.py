"""The `adapters` command: upload, list, show and delete adapters on a gateway."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from adapters.check import check
from adapters.client import AdaptersClient, ClientError, Exit
from adapters.errors import InvalidAdapter
from adapters.identity import InvalidName, check_name
from adapters.precheck import precheck

_HELP = """Upload, list, show and delete LoRA adapters on a Loraplex gateway.

The server and key come from --url and --api-key of each command, or from LORAPLEX_URL and LORAPLEX_API_KEY.

Exit codes: 0 done; 1 refused by the server, or not a valid adapter; 2 wrong usage; 3 the server cannot be
reached; 4 the key is not accepted; 5 there is no such adapter.
"""

app = typer.Typer(
    name="adapters",
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option("--url", envvar="LORAPLEX_URL", help="Base URL of the gateway.")]
ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="LORAPLEX_API_KEY",
        show_envvar=True,
        show_default=False,
        help="A key with the scope 'adapters'. The variable keeps it out of the process list.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
Name = Annotated[str, typer.Argument(help="The adapter's name.", show_default=False)]

_DEFAULT_URL = "http://127.0.0.1:8000"


app.command()(check)


@app.command()
def upload(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help=f"The folder that PEFT's save_pretrained wrote, with {CONFIG_FILE} and {WEIGHTS_FILE}.",
        ),
    ],
    name: Annotated[str, typer.Option("--name", help="What to call it: a-z, 0-9, '.', '_', '-'.")],
    allow_zero: Annotated[
        bool, typer.Option("--allow-zero", help="Accept an adapter that changes nothing, as before training.")
    ] = False,
    url: Url = _DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Upload an adapter as a new version of a name, which then means this version.

    Example: adapters upload ./pirate --name pirate
    """
    check_name(name)
    precheck(folder)
    total = sum((folder / file).stat().st_size for file in (CONFIG_FILE, WEIGHTS_FILE))
    with _client(url, api_key) as client, _progress() as progress:
        task = progress.add_task(f"uploading {name}", total=total)

        def on_sent(count: int) -> None:
            progress.advance(task, count)
            if progress.finished:
                progress.update(task, description=f"checking {name}")

        adapter = client.upload(folder, name, allow_zero=allow_zero, on_sent=on_sent)
    if as_json:
        _print_json(adapter)
    else:
        typer.echo(
            f"{adapter['id']}: rank {adapter['rank']}, {decimal(adapter['bytes'])}, on "
            f"{', '.join(adapter['target_modules'])}"
        )


@app.command("list")
def list_adapters(url: Url = _DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List your adapters, each with the version that its name means."""
    with _client(url, api_key) as client:
        answer = client.list()
    if as_json:
        _print_json(answer)
    elif answer["data"]:
        _print_table(answer["data"])
    else:
        typer.echo("no adapters; upload one with: adapters upload DIR --name NAME")


@app.command()
def show(name: Name, url: Url = _DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Show an adapter's versions, and which engines have it loaded."""
    check_name(name)
    with _client(url, api_key) as client:
        adapter = client.show(name)
    if as_json:
        _print_json(adapter)
        return
    typer.echo(f"{adapter['id']}  sha256:{adapter['digest']}")
    _print_table(adapter["versions"])
    for engine, tier in sorted(adapter["residency"].items()):
        typer.echo(f"loaded on {engine}: {tier}")


@app.command()
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = _DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Delete an adapter with all its versions. Asks first."""
    check_name(name)
    if not yes:
        typer.confirm(f"Delete '{name}' with all its versions?", abort=True, err=True)
    with _client(url, api_key) as client:
        answer = client.delete(name)
    _print_json(answer) if as_json else typer.echo(f"deleted {name}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and ends the process with an exit code; every failure is one line on stderr."""
    try:
        app(args=arguments)
    except InvalidName as error:
        _fail(str(error), Exit.USAGE)
    except InvalidAdapter as error:
        _fail(error.message, Exit.REFUSED)
    except ClientError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(f"Cannot read {error.filename}: {error.strerror}.", Exit.REFUSED)


def _fail(message: str, exit_code: Exit) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(exit_code)


def _client(url: str, api_key: str) -> AdaptersClient:
    if not api_key:
        raise ClientError("Give your API key with --api-key or LORAPLEX_API_KEY.", Exit.USAGE)
    return AdaptersClient(url, api_key)


def _progress() -> Progress:
    """A bar on stderr; nothing where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table(adapters: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("adapter", "rank", "size", "modules", "base model", "created"):
        table.add_column(heading, overflow="fold")
    for adapter in adapters:
        created = datetime.fromtimestamp(adapter["created"], UTC)
        table.add_row(
            adapter["id"],
            str(adapter["rank"]),
            decimal(adapter["bytes"]),
            " ".join(adapter["target_modules"]),
            adapter["base_model"] or "",
            created.strftime("%Y-%m-%d %H:%M UTC"),
        )
    Console(highlight=False, markup=False, soft_wrap=True).print(table)
