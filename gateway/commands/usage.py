"""`loraplex usage`: what tenants have used, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from gateway.commands.admin_client import DEFAULT_URL, AdminClient, AsJson, Url, show_json
from gateway.commands.exits import CommandFailed, Exit


class By(StrEnum):
    """What rows may stand for."""

    DAY = "day"
    TENANT = "tenant"
    ADAPTER = "adapter"
    KEY = "key"


_OWN, _ALL = "/v1", "/admin"
_DEFAULT = {_OWN: By.DAY, _ALL: By.TENANT}


def usage(
    tenant: Annotated[
        str | None, typer.Option(help="One tenant, with the operator's key; all by default.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="First UTC day, as in 2026-11-01. 30 days by default.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Last UTC day, included. Today by default.")] = None,
    by: Annotated[
        list[By] | None,
        typer.Option(help="What to group by. Repeatable; by day with a tenant's key, else by tenant."),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="TOML or JSON file of prices to use in place of the gateway's.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key",
            envvar="LORAPLEX_API_KEY",
            help="A tenant's key, or the operator's.",
            show_default=False,
        ),
    ] = "",
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for spreadsheets.")] = False,
) -> None:
    """Show what was used: with a tenant's key its own, with the operator's key everybody's.

    A request counts on the UTC day on which it came. Cached tokens are part of the input.
    """
    if as_json and as_csv:
        raise CommandFailed("Choose one of --json and --csv.", Exit.USAGE)
    period = {name: day for name, day in (("since", since), ("until", until)) if day is not None}
    price_list = _load(prices) if prices else None
    answer, groups = _fetch(url, api_key, tenant, period, by or [], finest=price_list is not None)
    if price_list is not None:
        from gateway.usage import summarise, use_of

        summary = summarise([use_of(row) for row in answer["data"]], groups, price_list)
        answer |= {"group_by": summary.group_by, "data": summary.objects(), "total": summary.total_object()}
    if as_json:
        show_json(answer)
        return
    columns = [*answer["group_by"], *answer["total"]]
    if as_csv:
        from gateway.csv_text import to_csv

        rows = [[row[column] for column in columns] for row in answer["data"]]
        typer.echo(to_csv(columns, rows), nl=False)
    else:
        _show_table(columns, answer)


def _load(path: Path) -> Any:
    from gateway.prices import InvalidPrices, load_prices

    try:
        return load_prices(path)
    except InvalidPrices as error:
        raise CommandFailed(str(error), Exit.USAGE) from None


def _fetch(
    url: str, api_key: str, tenant: str | None, period: dict[str, str], by: Sequence[By], *, finest: bool
) -> tuple[dict[str, Any], Sequence[Any]]:
    """Asks for the usage that the key may see. Returns the answer, and what its rows should be grouped by.

    `finest`: by tenant and adapter as well, which prices depend on. Which of the two routes a key is for is
    not to be seen from it, so they are tried in order.
    """
    refusal: CommandFailed | None = None
    for root in (_OWN, _ALL) if tenant is None else (_ALL,):
        groups = [each.value for each in by or [_DEFAULT[root]]]
        wanted = {*groups, By.TENANT.value, By.ADAPTER.value} if finest else groups
        query = [*period.items(), *(("group_by", each) for each in wanted)]
        if tenant is not None:
            query.append(("tenant", tenant))
        client = AdminClient(url, api_key, root=root, whose_key="a tenant's key, or the operator's,")
        try:
            return client.call("GET", "/usage?" + urlencode(query)), groups
        except CommandFailed as failure:
            if failure.exit_code != Exit.NOT_AUTHORISED:
                raise
            refusal = refusal or failure
    assert refusal is not None
    raise refusal


def _show_table(columns: Sequence[str], answer: dict[str, Any]) -> None:
    """Prints the rows and their total; whole, also where the terminal is narrow."""
    from rich.table import Table

    from adapters.commands.shared import table_console

    groups = answer["group_by"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_text = column in groups or column == "currency"
        table.add_column(column.replace("_", " "), overflow="fold", justify="left" if is_text else "right")
    for row in answer["data"]:
        table.add_row(*(_cell(column, row[column]) for column in columns))
    head = ["total", *[""] * (len(groups) - 1)] if groups else []
    table.add_row(*head, *(_cell(name, value) for name, value in answer["total"].items()), style="bold")
    console = table_console()
    console.print(f"{answer['since']} to {answer['until']}, UTC")
    console.print(table)


def _cell(column: str, value: str | int) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "(base model)" if column == By.ADAPTER and not value else value
