"""What versions hold: `adapters diff` and `download`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from adapters.commands.shared import (
    DEFAULT_URL,
    ApiKey,
    AsJson,
    Name,
    Url,
    Version,
    connect,
    print_json,
    print_table,
    progress_bar,
)
from adapters.download import download_version
from adapters.identity import check_name
from adapters.model_ref import parse_own_ref


def diff(
    name: Name,
    version: Version,
    other: Annotated[
        int | None, typer.Argument(min=1, help="The version to compare it with. Without it: the live one.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Show how two versions differ: in rank, targets, scale and type, and how far their updates are apart.

    Example: adapters diff sql 3 4
    """
    check_name(name)
    query = {"from": version} | ({} if other is None else {"to": other})
    with connect(url, api_key) as client:
        answer = client.of(name, "GET", "diff", query=query)
    if as_json:
        print_json(answer)
        return
    before, after = answer["from"]["id"], answer["to"]["id"]
    if not answer["changed"]:
        typer.echo(f"{before} and {after} are the same adapter")
        return
    fields = answer["changed"].items()
    print_table(
        ("", before, after), [(field, _said(pair["from"]), _said(pair["to"])) for field, pair in fields]
    )
    typer.echo()
    modules = [
        (row["module"], f"{row['from']:.4g}", f"{row['to']:.4g}", f"{row['difference']:.4g}")
        for row in answer["modules"]
    ]
    print_table(("norm of the update", before, after, "between"), modules)


def download(
    ref: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Without a version: the live one.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A new or empty folder. Default: ./NAME.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Write a version's files back as a folder that PEFT loads, verified by its digest.

    Example: adapters download sql@3 ./sql-3
    """
    name, _ = parse_own_ref(ref)
    target = folder or Path(name)
    with connect(url, api_key) as client, progress_bar() as progress:
        task = progress.add_task(f"downloading {ref}", total=None)
        answer = download_version(
            client,
            ref,
            target,
            on_total=lambda total: progress.update(task, total=total),
            on_received=lambda count: progress.advance(task, count),
        )
    if as_json:
        print_json(answer)
        return
    total = sum(file["bytes"] for file in answer["data"])
    typer.echo(f"{answer['adapter']['id']}: {len(answer['data'])} files, {decimal(total)}, in {target}")


def _said(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_said, value))
    return "" if value is None else str(value)
