"""`/v1/usage` and `/admin/usage`: what was used, in sums and request by request, as JSON or CSV."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import AfterValidator, StringConstraints

from gateway.accounts.entry import FIELDS
from gateway.auth import Principal, require
from gateway.csv_text import to_csv
from gateway.described import JSON, described
from gateway.errors import ApiError, invalid_request
from gateway.keys import NO_TENANT
from gateway.ledger_pages import RecordedRequest, read_page
from gateway.schemas.usage_answers import UsageRequest, UsageRequests, UsageSums
from gateway.services import Services
from gateway.usage import GroupBy, UsageSummary, days_of, summarise

router = APIRouter(tags=["usage"])

_CSV = "text/csv"
_DEFAULT_DAYS = 30
_MAX_DAYS = 366
_MAX_TENANT_DAYS = 20_000
_FORMS = {_CSV: None}
_BY_DAY: list[GroupBy] = ["day"]
_BY_TENANT: list[GroupBy] = ["tenant"]


def _in_utc(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


Format = Annotated[
    Literal["json", "csv"] | None,
    Query(description="`csv` is for spreadsheets, and also what `Accept: text/csv` gives."),
]
FirstDay = Annotated[date | None, Query(description="First UTC day; 30 days with the last one by default.")]
LastDay = Annotated[date | None, Query(description="Last UTC day, included; today by default.")]
Groups = Annotated[
    list[GroupBy], Query(description="What to group by; may be given more than once.", max_length=4)
]
Time = Annotated[datetime, AfterValidator(_in_utc)]
Cursor = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,15}-[0-9]{1,15}$")]
Name = Annotated[str, StringConstraints(max_length=200)]
TenantName = Annotated[str, StringConstraints(min_length=1, max_length=64)]


@router.get("/v1/usage")
@described(UsageSums, media=_FORMS)
async def show_usage(
    request: Request,
    caller: Annotated[Principal, Depends(require("inference"))],
    since: FirstDay = None,
    until: LastDay = None,
    group_by: Groups = _BY_DAY,
    format: Format = None,
) -> Response:
    """Sums up what the caller's tenant used."""
    first, last = _days(since, until)
    summary = await _summary(request.app.state.services, [caller.tenant_id], first, last, group_by)
    return _answer(request, summary, first, last, format)


@router.get("/admin/usage")
@described(UsageSums, media=_FORMS, errors=(404,))
async def show_usage_of_tenants(
    request: Request,
    caller: Annotated[Principal, Depends(require("admin"))],
    tenant: Annotated[
        TenantName | None, Query(description="One tenant; also one that was deleted. All by default.")
    ] = None,
    since: FirstDay = None,
    until: LastDay = None,
    group_by: Groups = _BY_TENANT,
    format: Format = None,
) -> Response:
    """Sums up what one tenant used, or all of them."""
    services: Services = request.app.state.services
    first, last = _days(since, until)
    tenants = await _tenants(services, caller, tenant)
    if len(tenants) * ((last - first).days + 1) > _MAX_TENANT_DAYS:
        message = (
            f"{len(tenants)} tenants over so many days are too much at once. Name a tenant, or fewer days."
        )
        raise invalid_request(message, param="since")
    summary = await _summary(services, tenants, first, last, group_by)
    return _answer(request, summary, first, last, format)


@router.get("/v1/usage/requests")
@described(UsageRequests, media=_FORMS)
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


async def _tenants(services: Services, caller: Principal, named: str | None) -> list[str]:
    """Whose usage the caller sees: the operator anyone's, a tenant's own key its own. Raises ApiError."""
    if caller.tenant_id != NO_TENANT and named in (None, caller.tenant_id):
        return [caller.tenant_id]
    known = await services.usage.tenants() if caller.tenant_id == NO_TENANT else []
    if named is None:
        return known
    if named in known or (caller.tenant_id == NO_TENANT and await services.tenants.get(named)):
        return [named]
    message = f"There is no tenant '{named}'."
    raise ApiError(404, message, type="invalid_request_error", code="tenant_not_found", param="tenant")


def _days(since: date | None, until: date | None) -> tuple[date, date]:
    """The first and the last day. Raises ApiError 400 when they are not in order, or too far apart."""
    last = until or datetime.now(UTC).date()
    first = since or date.fromordinal(max(1, last.toordinal() - _DEFAULT_DAYS + 1))
    if first > last:
        raise invalid_request(f"'since' is {first}, which is after {last}, the last day.", param="since")
    if (last - first).days >= _MAX_DAYS:
        raise invalid_request(f"At most {_MAX_DAYS} days can be had at once.", param="since")
    return first, last


async def _summary(
    services: Services, tenants: Sequence[str], first: date, last: date, group_by: Sequence[GroupBy]
) -> UsageSummary:
    uses = await services.usage.uses(tenants, days_of(first, last))
    return summarise(uses, group_by, services.prices)


def _answer(request: Request, summary: UsageSummary, first: date, last: date, format: str | None) -> Response:
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
    return None if time is None else max(0, round(time.timestamp() * 1000))
