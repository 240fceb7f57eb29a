"""Lets other tenants use a tenant's adapter. They name it `owner/name`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Depends, Request

from adapters import lifecycle
from gateway.adapter_objects import own_name
from gateway.api.audited import audited_router
from gateway.auth import Principal, require
from gateway.described import described
from gateway.errors import invalid_request
from gateway.schemas.adapter_answers import Grant
from gateway.services import Services

router = audited_router("/v1/adapters/{name}/grants")

Caller = Annotated[Principal, Depends(require("adapters"))]


def _tenant_id(tenant: str) -> str:
    """A path's other tenant. Raises ApiError 400 for what can be no tenant's id."""
    if re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", tenant) is None:
        message = f"{tenant[:80]!a} is no tenant's id: those have 1 to 63 of a-z, 0-9 and '-'."
        raise invalid_request(message, param="tenant", code="invalid_value")
    return tenant


Grantee = Annotated[str, Depends(_tenant_id)]


@router.put("/{tenant}")
@described(Grant, errors=(409,))
async def grant_adapter(name: str, tenant: Grantee, request: Request, caller: Caller) -> dict[str, Any]:
    """Lets a tenant use all versions of the name. Whether there is such a tenant is not said."""
    services: Services = request.app.state.services
    if tenant == caller.tenant_id:
        message = f"'{name}' is this tenant's own. Name another tenant."
        raise invalid_request(message, param="tenant", code="own_adapter")
    await services.registry.grants.grant(caller.tenant_id, own_name(name), tenant, by=caller.key_id)
    await lifecycle.record(services.registry, services.store, caller.tenant_id, name)
    return _object(caller, name, tenant, granted=True)


@router.delete("/{tenant}")
@described(Grant, errors=(409,))
async def revoke_grant(name: str, tenant: Grantee, request: Request, caller: Caller) -> dict[str, Any]:
    """Takes a grant back, from the next request on. One that was not given is no error."""
    services: Services = request.app.state.services
    await services.registry.grants.revoke(caller.tenant_id, own_name(name), tenant, by=caller.key_id)
    await lifecycle.record(services.registry, services.store, caller.tenant_id, name)
    return _object(caller, name, tenant, granted=False)


def _object(caller: Principal, name: str, tenant: str, *, granted: bool) -> dict[str, Any]:
    return {
        "id": f"{caller.tenant_id}/{name}",
        "object": "adapter.grant",
        "name": name,
        "tenant": tenant,
        "granted": granted,
    }
