"""Whom the operator's API lets do what, and what its parts have in common.

A key with the scope `admin` that belongs to a tenant administers that tenant's keys, and reads its own record
and audit. Everything else is the operator's. Of other tenants it learns nothing: not even that they exist.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request

from gateway.api.counted import count_management
from gateway.audit import Actor
from gateway.auth import Principal, address_of, require
from gateway.errors import ApiError
from gateway.keys import NO_TENANT
from gateway.services import Services
from gateway.tenants import Tenant

Admin = Annotated[Principal, Depends(require("admin"))]
PathTenant = Annotated[str, Path(max_length=63)]


def admin_router(path: str) -> APIRouter:
    """Returns a router below `/admin`, of routes that need the scope `admin` at least."""
    dependencies = [Depends(require("admin")), Depends(count_management)]
    return APIRouter(prefix=f"/admin{path}", dependencies=dependencies, tags=["admin"])


async def require_operator(caller: Admin) -> Principal:
    """A dependency: yields the operator. Raises ApiError 403 for a tenant's own admin."""
    if caller.tenant_id != NO_TENANT:
        message = "Only the operator may do this. This key administers its own tenant."
        raise ApiError(403, message, type="permission_error", code="operator_only")
    return caller


async def require_admin_of(tenant_id: PathTenant, caller: Admin) -> Principal:
    """A dependency: yields whoever administers the path's tenant.

    Raises ApiError 404 for another tenant's admin, as if there were no such tenant.
    """
    if caller.tenant_id not in (NO_TENANT, tenant_id):
        raise no_tenant(tenant_id)
    return caller


Operator = Annotated[Principal, Depends(require_operator)]
AdminOfTenant = Annotated[Principal, Depends(require_admin_of)]


def actor_of(request: Request, caller: Principal) -> Actor:
    """Who the audit says it was."""
    return Actor(caller.key_id, caller.tenant_id, address_of(request))


async def find_tenant(services: Services, tenant_id: str) -> Tenant:
    """Returns the tenant. Raises ApiError 404."""
    tenant = await services.tenants.get(tenant_id)
    if tenant is None:
        raise no_tenant(tenant_id)
    return tenant


def no_tenant(tenant_id: str) -> ApiError:
    """Returns the 404 for a tenant that is not there, or is none of the caller's business."""
    message = f"There is no tenant '{tenant_id}'."
    return ApiError(404, message, type="invalid_request_error", code="tenant_not_found", param="tenant_id")
