"""What the commands of `adapters` share: their options, the client, and how answers are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
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

from adapters.client import AdaptersClient, ClientError, Exit

_ANY_WIDTH = 100_000
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd")

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
Version = Annotated[
    int, typer.Argument(min=1, help="Number of the version: 3 for sql@3.", show_default=False)
]
NewName = Annotated[str, typer.Option("--name", help="What to call it: a-z, 0-9, '.', '_', '-'.")]
AllowZero = Annotated[
    bool, typer.Option("--allow-zero", help="Accept an adapter that changes nothing, as before training.")
]
Promote = Annotated[
    bool, typer.Option("--promote/--no-promote", help="Make it live at once, or only stage it.")
]

DEFAULT_URL = "http://127.0.0.1:8000"


def connect(url: str, api_key: str) -> AdaptersClient:
    """Returns the client of a command. Raises `ClientError` without a key."""
    if not api_key:
        raise ClientError("Give your API key with --api-key or LORAPLEX_API_KEY.", Exit.USAGE)
    return AdaptersClient(url, api_key, _say_wait)


def _say_wait(reason: str, seconds: float) -> None:
    typer.echo(f"{reason} Waiting {seconds:.0f} s.", err=True)


def progress_bar() -> Progress:
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


def print_json(value: dict[str, Any]) -> None:
    """Prints an answer as JSON."""
    typer.echo(json.dumps(value, indent=2))


def printable(text: str) -> str:
    """Returns a text with U+FFFD for control characters: what others have named or noted could command the
    terminal of whoever lists it.
    """
    return text.translate(_CONTROLS)


def table_console() -> Console:
    """A console for tables. Where its output is no terminal, rows have a line each, however long they are."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _ANY_WIDTH
    return console


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under headings; whole, also where the terminal is narrow."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    table_console().print(table)


def print_versions(adapters: Sequence[dict[str, Any]]) -> None:
    """Prints a table of versions."""
    rows = [
        (
            adapter["id"],
            str(adapter["rank"]),
            decimal(adapter["bytes"]),
            " ".join(adapter["target_modules"]),
            adapter["base_model"] or "",
            moment(adapter["created"]),
            "; ".join(_notes(adapter)),
        )
        for adapter in adapters
    ]
    print_table(("adapter", "rank", "size", "modules", "base model", "created", ""), rows)


def meaning(adapter: dict[str, Any]) -> str:
    """What a name means now, in a line: which version is live, a canary, and whether it is pinned."""
    means = f"{adapter['name']} means {adapter['id']}" if adapter["live"] else adapter["name"]
    return "; ".join([means, *_notes(adapter)])


def _notes(adapter: dict[str, Any]) -> list[str]:
    """What goes for a name beside its live version; nothing for what is listed as one of several versions."""
    if "live" not in adapter:
        return []
    notes = [] if adapter["live"] else ["no live version"]
    if canary := adapter["canary"]:
        notes.append(f"canary {adapter['name']}@{canary['version']} gets {canary['percent']:g} %")
    return notes + (["pinned"] if adapter["pinned"] else [])


def moment(seconds: int) -> str:
    """A time as people read it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
