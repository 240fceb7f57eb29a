"""`GET /admin/audit`: who did what, the latest first."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request

from gateway.api.admin_access import Admin, admin_router
from gateway.audit import GATEWAY, AuditEntry, AuditQuery
from gateway.auth import Principal
from gateway.described import described
from gateway.errors import ApiError
from gateway.keys import NO_TENANT
from gateway.schemas.admin_answers import AuditList
from gateway.services import Services

router = admin_router("/audit")

Time = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False, description="Unix seconds.")]


@router.get("")
@described(AuditList)
async def list_audit(
    request: Request,
    caller: Admin,
    since: Time = None,
    until: Time = None,
    tenant: Annotated[str | None, Query(max_length=63, description="Only what concerns it.")] = None,
    action: Annotated[
        str | None, Query(max_length=64, description="`key.revoke`, or `key.` for all that begin so.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(pattern=r"^[1-9][0-9]{0,14}-[0-9]{1,15}$")] = None,
) -> dict[str, Any]:
    """Lists changes of tenants, keys, limits and adapters. A tenant's own admin sees those of its tenant."""
    services: Services = request.app.state.services
    page = await services.audit.page(
        AuditQuery(
            since_ms=None if since is None else int(since * 1000),
            until_ms=None if until is None else int(until * 1000),
            tenant_id=_tenant_to_show(caller, tenant),
            action=action,
            limit=limit,
            before_id=cursor,
        )
    )
    data = [_entry_object(entry, caller) for entry in page.entries]
    return {"object": "list", "data": data, "next": page.next}


def _tenant_to_show(caller: Principal, asked: str | None) -> str | None:
    """Whose entries the caller sees; None: all. Raises ApiError 403."""
    if caller.tenant_id == NO_TENANT:
        return asked
    if asked not in (None, caller.tenant_id):
        message = "Only the operator may read the audit of another tenant."
        raise ApiError(403, message, type="permission_error", code="operator_only", param="tenant")
    return caller.tenant_id


def _entry_object(entry: AuditEntry, caller: Principal) -> dict[str, Any]:
    actor, change = entry.actor, entry.change
    by_operator = actor.tenant_id == NO_TENANT
    hidden = by_operator and caller.tenant_id != NO_TENANT  # where the operator sits is no tenant's business
    return {
        "id": entry.id,
        "object": "audit.entry",
        "at": entry.time_ms / 1000,
        "action": change.action,
        "tenant": change.tenant_id or None,
        "target": change.object,
        "key": actor.key_id,
        "by": "gateway" if actor == GATEWAY else "operator" if by_operator else actor.tenant_id,
        "address": None if hidden else actor.address or None,
        "before": change.before,
        "after": change.after,
    }
