"""`/v1/usage`: what the caller's tenant used, in sums and request by request, as JSON or CSV."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import AfterValidator, BeforeValidator, StringConstraints
from pydantic_core import PydanticCustomError

from gateway.accounts.entry import FIELDS
from gateway.auth import Principal, require
from gateway.csv_text import to_csv
from gateway.described import JSON, described
from gateway.errors import invalid_request
from gateway.ledger_pages import RecordedRequest, read_page
from gateway.schemas.usage_answers import UsageRequest, UsageRequests, UsageSums
from gateway.services import Services
from gateway.usage import GroupBy, days_of, summarise

router = APIRouter(tags=["usage"])

_CSV = "text/csv"
_DEFAULT_DAYS = 30
_MAX_DAYS = 366
FORMS = {_CSV: None}
"""What an answer may come in, beside JSON."""
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_BY_DAY: list[GroupBy] = ["day"]


def _in_utc(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _written_out(value: str) -> str:
    """pydantic would take seconds since 1970 as well."""
    if not _DAY.match(value):
        raise PydanticCustomError("day", "It is written as in 2026-11-29 or 2026-11-29T12:00:00Z")
    return value


Format = Annotated[
    Literal["json", "csv"] | None,
    Query(description="`csv` is for spreadsheets, and also what `Accept: text/csv` gives."),
]
Day = Annotated[date, BeforeValidator(_written_out)]
FirstDay = Annotated[Day | None, Query(description="First UTC day; 30 days with the last one by default.")]
LastDay = Annotated[Day | None, Query(description="Last UTC day, included; today by default.")]
Groups = Annotated[
    list[GroupBy], Query(description="What to group by; may be given more than once.", max_length=4)
]
Time = Annotated[datetime, BeforeValidator(_written_out), AfterValidator(_in_utc)]
Cursor = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,14}-[0-9]{1,15}$")]
Name = Annotated[str, StringConstraints(max_length=200)]


@router.get("/v1/usage")
@described(UsageSums, media=FORMS)
async def show_usage(
    request: Request,
    caller: Annotated[Principal, Depends(require("inference"))],
    since: FirstDay = None,
    until: LastDay = None,
    group_by: Groups = _BY_DAY,
    format: Format = None,
) -> Response:
    """Sums up what the caller's tenant used."""
    return await sums_answer(request, [caller.tenant_id], period_of(since, until), group_by, format)


@router.get("/v1/usage/requests")
@described(UsageRequests, media=FORMS)
async def list_usage_requests(
    request: Request,
    caller: Annotated[Principal, Depends(require("inference"))],
    since: Annotated[Time | None, Query(description="Entered from then on; UTC unless it says.")] = None,
    until: Annotated[Time | None, Query(description="Entered before then.")] = None,
    adapter: Annotated[
        Name | None, Query(description="Of this adapter only; empty for the base model.")
    ] = None,
    key: Annotated[Name | None, Query(description="With the key of this id only.")] = None,
    cursor: Annotated[Cursor | None, Query(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many at most.")] = 100,
    format: Format = None,
) -> Response:
    """Lists the single requests of the caller's tenant, by when they were entered, the latest first.

    A page may have fewer than `limit`, and yet not be the last: `next_cursor` says. In CSV it is the header
    `x-next-cursor`.
    """
    services: Services = request.app.state.services
    page = await read_page(
        services.redis,
        caller.tenant_id,
        since_ms=_ms(since),
        until_ms=_ms(until),
        cursor=cursor,
        limit=limit,
        wanted=lambda entry: adapter in (None, entry.adapter) and key in (None, entry.key),
    )
    data = [_request_object(found) for found in page.requests]
    if _wants_csv(request, format):
        columns = [name for name in UsageRequest.__annotations__ if name != "object"]
        headers = {"x-next-cursor": page.cursor} if page.cursor else {}
        return _csv(columns, [[row[name] for name in columns] for row in data], headers)
    more = {"has_more": page.cursor is not None, "next_cursor": page.cursor}
    return Response(orjson.dumps({"object": "list", "data": data, **more}), media_type=JSON)


def period_of(since: date | None, until: date | None) -> tuple[date, date]:
    """Returns the first and the last day. Raises ApiError 400 where they are in disorder or too far apart."""
    last = until or datetime.now(UTC).date()
    first = since or date.fromordinal(max(1, last.toordinal() - _DEFAULT_DAYS + 1))
    if first > last:
        raise invalid_request(f"'since' is {first}, which is after {last}, the last day.", param="since")
    if (last - first).days >= _MAX_DAYS:
        raise invalid_request(f"At most {_MAX_DAYS} days can be had at once.", param="since")
    return first, last


async def sums_answer(
    request: Request,
    tenants: Sequence[str],
    period: tuple[date, date],
    group_by: Sequence[GroupBy],
    format: str | None,
) -> Response:
    """Returns what these tenants used from the first to the last day."""
    services: Services = request.app.state.services
    first, last = period
    uses = await services.usage.uses(tenants, days_of(first, last))
    summary = await asyncio.to_thread(summarise, uses, group_by, services.prices)
    if _wants_csv(request, format):
        return _csv(summary.columns, [summary.values(row) for row in summary.rows], {})
    body = {
        "object": "usage",
        "since": first,
        "until": last,
        "group_by": summary.group_by,
        "data": summary.objects(),
        "total": summary.total_object(),
    }
    return Response(orjson.dumps(body), media_type=JSON)


def _wants_csv(request: Request, format: str | None) -> bool:
    return format == "csv" or (format is None and _CSV in request.headers.get("accept", ""))


def _csv(
    columns: Sequence[str], rows: Sequence[Sequence[str | int | None]], headers: dict[str, str]
) -> Response:
    disposition = {"Content-Disposition": 'attachment; filename="usage.csv"'}
    return Response(to_csv(columns, rows), media_type=_CSV, headers=headers | disposition)


def _request_object(found: RecordedRequest) -> dict[str, Any]:
    values = {name: getattr(found.entry, name) for name in FIELDS if name != "tenant"}
    times = {"time": _time_text(found.entry.time), "recorded": _time_text(found.recorded_ms)}
    return {"object": "usage.request", **values, **times}


def _time_text(ms: int) -> str:
    time = datetime.fromtimestamp(ms / 1000, UTC)
    return f"{time:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z"


def _ms(time: datetime | None) -> int | None:
    """Times before 1970 are as good as its first millisecond; before that, Redis has no id to name."""
    return None if time is None else max(1, round(time.timestamp() * 1000))
