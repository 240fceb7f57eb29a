"""How limits are written on the command line: `--limit requests_per_minute=600`, and `none` to unset one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from gateway.commands.exits import CommandFailed, Exit
from gateway.limits import RATE_NAMES, TENANT_LIMIT_NAMES

Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=N|none",
        help="A limit, as in requests_per_minute=600 or tokens_per_month=2M; `none` for no limit. "
        f"Repeatable. Names: {', '.join(TENANT_LIMIT_NAMES)}.",
        show_default=False,
    ),
]
Rates = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=N",
        help="A limit of this key alone, as in requests_per_minute=60. Repeatable. "
        f"Names: {', '.join(RATE_NAMES)}.",
        show_default=False,
    ),
]
AdapterRates = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter-limit",
        metavar="ADAPTER:NAME=N|none",
        help="A limit of one adapter, as in sql:requests_per_minute=60; `sql:none` unsets all of its. "
        f"Repeatable. Names: {', '.join(RATE_NAMES)}.",
        show_default=False,
    ),
]

_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_limits(options: Sequence[str], names: Sequence[str]) -> dict[str, int | None]:
    """Returns limits by name, as the API has them. Raises CommandFailed."""
    limits: dict[str, int | None] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in names:
            raise CommandFailed(f"There is no limit '{name}'. Limits are {', '.join(names)}.", Exit.USAGE)
        limits[name] = _number(option, value)
    return limits


def parse_adapter_limits(options: Sequence[str]) -> dict[str, Any]:
    """Returns limits by adapter and name, as the API has them. Raises CommandFailed."""
    by_adapter: dict[str, Any] = {}
    for option in options:
        adapter, colon, limit = option.partition(":")
        if not adapter or not colon:
            message = f"'{option}' names no adapter. Write it as sql:requests_per_minute=60."
            raise CommandFailed(message, Exit.USAGE)
        if limit == "none":
            by_adapter[adapter] = None
        else:
            by_adapter[adapter] = (by_adapter.get(adapter) or {}) | parse_limits([limit], RATE_NAMES)
    return by_adapter


def describe_limits(limits: dict[str, int | None]) -> list[str]:
    """Returns a line for each limit that is set."""
    return [f"{name} {value:,}" for name, value in limits.items() if value is not None]


def _number(option: str, text: str) -> int | None:
    if text == "none":
        return None
    digits, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    if not digits.isdecimal():
        message = f"'{option}' has no number. Write one, as in requests_per_minute=600 or =2M, or 'none'."
        raise CommandFailed(message, Exit.USAGE)
    return int(digits) * unit
