"""`/admin/usage`: what tenants used, as JSON or CSV."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from gateway.api.admin_access import Operator, admin_router, no_tenant
from gateway.api.usage import FORMS, FirstDay, Format, Groups, LastDay, period_of, sums_answer
from gateway.described import described
from gateway.errors import invalid_request
from gateway.schemas.usage_answers import UsageSums
from gateway.services import Services
from gateway.usage import GroupBy

router = admin_router("/usage")

_MAX_TENANT_DAYS = 20_000
_BY_TENANT: list[GroupBy] = ["tenant"]


@router.get("")
@described(UsageSums, media=FORMS, errors=(404,))
async def show_usage_of_tenants(
    request: Request,
    caller: Operator,
    tenant: Annotated[
        str | None, Query(max_length=63, description="One tenant, deleted ones too; all by default.")
    ] = None,
    since: FirstDay = None,
    until: LastDay = None,
    group_by: Groups = _BY_TENANT,
    format: Format = None,
) -> Response:
    """Sums up what one tenant used, or all of them, deleted ones too."""
    services: Services = request.app.state.services
    first, last = period_of(since, until)
    tenants = await services.usage.tenants()
    if tenant is not None:
        if tenant not in tenants and await services.tenants.get(tenant) is None:
            raise no_tenant(tenant)
        tenants = [tenant]
    days = (last - first).days + 1
    if len(tenants) * days > _MAX_TENANT_DAYS:
        message = (
            f"{days} days of {len(tenants)} tenants are too much at once. Ask for one tenant, or fewer days."
        )
        raise invalid_request(message, param="since")
    return await sums_answer(request, tenants, (first, last), group_by, format)
