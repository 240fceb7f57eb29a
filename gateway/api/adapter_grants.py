"""Lets other tenants use a tenant's adapter. They name it `owner/name`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request

from adapters import lifecycle
from gateway.adapter_objects import own_name
from gateway.auth import Principal, require
from gateway.errors import invalid_request
from gateway.services import Services

router = APIRouter(prefix="/v1/adapters/{name}/grants", tags=["adapters"])

Caller = Annotated[Principal, Depends(require("adapters"))]
Grantee = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


@router.put("/{tenant}")
async def grant(name: str, tenant: Grantee, request: Request, caller: Caller) -> dict[str, Any]:
    """Lets a tenant use all versions of the name. Whether there is such a tenant is not said."""
    services: Services = request.app.state.services
    if tenant == caller.tenant_id:
        message = f"'{name}' is this tenant's own. Name another tenant."
        raise invalid_request(message, param="tenant", code="own_adapter")
    await services.registry.grants.grant(caller.tenant_id, own_name(name), tenant, by=caller.key_id)
    await lifecycle.record(services.registry, services.store, caller.tenant_id, name)
    return _object(caller, name, tenant, granted=True)


@router.delete("/{tenant}")
async def revoke(name: str, tenant: Grantee, request: Request, caller: Caller) -> dict[str, Any]:
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
