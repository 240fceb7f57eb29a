"""`loraplex audit`: who did what to tenants, keys, limits and adapters."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from gateway.commands.admin_client import (
    DEFAULT_URL,
    AdminClient,
    ApiKey,
    AsJson,
    Url,
    show_json,
    show_table,
)
from gateway.commands.exits import CommandFailed, Exit

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_PAGE = 1000


def audit(
    tenant: Annotated[str | None, typer.Option(help="Only what concerns this tenant.")] = None,
    action: Annotated[
        str | None,
        typer.Option(help="Only this action, as in key.revoke, or all that begin so: key. or adapter."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="From then on: 30m, 12h or 7d ago, or a time in UTC, as in 2026-11-01.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Until then; written the same way.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many entries at most.")] = 50,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Show who did what to tenants, keys, limits and adapters, the latest first.

    A tenant's own key with the scope admin sees what concerns its tenant.
    """
    asked = {
        "tenant": tenant,
        "action": action,
        "since": _time(since),
        "until": _time(until),
    }
    entries = _read(AdminClient(url, api_key), asked, limit)
    if as_json:
        show_json({"object": "list", "data": entries})
    else:
        show_table(("time", "by", "action", "tenant", "target", "change"), [_row(entry) for entry in entries])


def _read(client: AdminClient, asked: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    """Reads page after page until there are enough."""
    query = {name: value for name, value in asked.items() if value is not None}
    entries: list[dict[str, Any]] = []
    while True:
        query["limit"] = min(limit - len(entries), _PAGE)
        page = client.call("GET", f"/audit?{urlencode(query)}")
        entries += page["data"]
        if len(entries) >= limit or page["next"] is None:
            return entries
        query["cursor"] = page["next"]


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    when = datetime.fromtimestamp(entry["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    by = f"{entry['by']}, {entry['key']}" if entry["key"] not in (entry["by"], "") else entry["by"]
    if entry["address"]:
        by += f", {entry['address']}"
    return (when, by, entry["action"], entry["tenant"] or "", entry["target"], _change(entry))


def _change(entry: dict[str, Any]) -> str:
    """What differs, as `weight: 1.0 → 2.0`; of what is new, only what it is."""
    before, after = entry["before"], entry["after"]
    parts: list[str] = []
    for name in {**before, **after}:
        sides = [json.dumps(side[name]) if name in side else "none" for side in (before, after)]
        parts.append(f"{name}: {' → '.join(sides) if before else sides[1]}")
    return "; ".join(parts)


def _time(text: str | None) -> float | None:
    """Unix seconds of what a user writes. Raises CommandFailed."""
    if text is None:
        return None
    ago = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if ago:
        return time.time() - int(ago[1]) * _SECONDS[ago[2]]
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        message = f"'{text}' is no time. Write 30m, 12h or 7d, or 2026-11-01 or 2026-11-01T12:30."
        raise CommandFailed(message, Exit.USAGE) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
