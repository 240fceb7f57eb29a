"""The operator's API: tenants and their keys."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from adapters import lifecycle
from adapters.registry import AdapterNotFound
from gateway.adapter_removal import delete_adapter
from gateway.auth import require
from gateway.errors import ApiError
from gateway.keys import DEFAULT_SCOPES, SCOPES, KeyRecord, NoSuchTenant
from gateway.services import Services
from gateway.tenants import DEFAULT_PINS, PrefixSharing, Tenant, TenantExists

router = APIRouter(prefix="/admin", dependencies=[Depends(require("admin"))], tags=["admin"])

TenantId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
TenantName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Pins = Annotated[int, Field(ge=0, le=10_000)]
Weight = Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)]
_TEN_YEARS_S = 10 * 365 * 86_400


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CreateTenant(_Body):
    """Body of `POST /admin/tenants`."""

    name: TenantName
    id: TenantId | None = None
    weight: Weight = 1.0
    prefix_sharing: PrefixSharing = PrefixSharing.PRIVATE
    max_pinned_adapters: Pins = DEFAULT_PINS


class UpdateTenant(_Body):
    """Body of `PATCH /admin/tenants/{id}`: what is absent stays."""

    name: TenantName | None = None
    weight: Weight | None = None
    prefix_sharing: PrefixSharing | None = None
    max_pinned_adapters: Pins | None = None
    suspended: bool | None = None


class CreateKey(_Body):
    """Body of `POST /admin/tenants/{id}/keys`. `expires_in`
    is in seconds; without it the key does not expire."""

    scopes: list[str] = sorted(DEFAULT_SCOPES)
    expires_in: Annotated[int, Field(gt=0, le=_TEN_YEARS_S)] | None = None
    note: Annotated[str, StringConstraints(max_length=200)] = ""


@router.post("/tenants", status_code=201)
async def create_tenant(body: CreateTenant, request: Request) -> dict[str, Any]:
    """Adds a tenant. 409 when the id is taken."""
    try:
        tenant = await _services(request).tenants.create(
            body.name,
            tenant_id=body.id,
            weight=body.weight,
            prefix_sharing=body.prefix_sharing,
            max_pinned_adapters=body.max_pinned_adapters,
        )
    except TenantExists:
        message = f"There is a tenant '{body.id}' already. Choose another id."
        raise ApiError(409, message, type="invalid_request_error", code="tenant_exists", param="id") from None
    return _tenant_object(tenant)


@router.get("/tenants")
async def list_tenants(request: Request) -> dict[str, Any]:
    """Lists all tenants, oldest first."""
    tenants = await _services(request).tenants.all()
    return {"object": "list", "data": [_tenant_object(tenant) for tenant in tenants]}


@router.get("/tenants/{tenant_id}")
async def show_tenant(tenant_id: str, request: Request) -> dict[str, Any]:
    """Shows one tenant."""
    return _tenant_object(await _tenant(_services(request), tenant_id))


@router.patch("/tenants/{tenant_id}")
async def update_tenant(tenant_id: str, body: UpdateTenant, request: Request) -> dict[str, Any]:
    """Changes the given fields; every gateway follows within a second."""
    changes = {key: value for key, value in body.model_dump().items() if value is not None}
    tenant = await _services(request).tenants.update(tenant_id, changes)
    if tenant is None:
        raise _no_tenant(tenant_id)
    return _tenant_object(tenant)


@router.delete("/tenants/{tenant_id}")
async def delete_tenant(tenant_id: str, request: Request) -> dict[str, Any]:
    """Deletes a tenant with its keys and adapters, and says which these were.

    The tenant itself goes last, so that a call that was cut short can be made again to finish.
    """
    services = _services(request)
    await _tenant(services, tenant_id)
    await services.tenants.update(tenant_id, {"suspended": True})
    keys, adapters = await _delete_possessions(services, tenant_id)
    await services.tenants.delete(tenant_id)
    await _delete_possessions(services, tenant_id)  # what a call in flight added meanwhile
    await lifecycle.forget_tenant(services.registry, services.store, tenant_id)
    return {"id": tenant_id, "object": "tenant.deleted", "deleted": True, "keys": keys, "adapters": adapters}


async def _delete_possessions(services: Services, tenant_id: str) -> tuple[list[str], list[str]]:
    """Deletes all keys and adapters of a tenant. Returns the keys' ids and the adapters' names."""
    keys = [record.id for record in await services.keys.of_tenant(tenant_id)]
    for key_id in keys:
        await services.keys.revoke(tenant_id, key_id)
    adapters = [item.name for item in await services.registry.list(tenant_id)]
    for name in adapters:
        with suppress(AdapterNotFound):
            await delete_adapter(services, tenant_id, name)
    return keys, adapters


@router.post("/tenants/{tenant_id}/keys", status_code=201)
async def create_key(tenant_id: str, body: CreateKey, request: Request) -> dict[str, Any]:
    """Makes a key. Its text is in this answer and never again."""
    unknown = sorted(set(body.scopes) - SCOPES)
    if unknown or not body.scopes:
        message = f"'{unknown[0]}' is no scope." if unknown else "A key needs at least one scope."
        message += f" Scopes are {', '.join(sorted(SCOPES))}."
        raise ApiError(400, message, type="invalid_request_error", code="invalid_scope", param="scopes")
    try:
        record, key = await _services(request).keys.create(
            tenant_id, scopes=body.scopes, expires_in=body.expires_in, note=body.note
        )
    except NoSuchTenant:
        raise _no_tenant(tenant_id) from None
    return {**_key_object(record), "key": key}


@router.get("/tenants/{tenant_id}/keys")
async def list_keys(tenant_id: str, request: Request) -> dict[str, Any]:
    """Lists a tenant's keys, without their secrets."""
    services = _services(request)
    await _tenant(services, tenant_id)
    records = await services.keys.of_tenant(tenant_id)
    return {"object": "list", "data": [_key_object(record) for record in records]}


@router.delete("/tenants/{tenant_id}/keys/{key_id}")
async def revoke_key(tenant_id: str, key_id: str, request: Request) -> dict[str, Any]:
    """Revokes a key: it stops on every gateway within a second."""
    services = _services(request)
    if not await services.keys.revoke(tenant_id, key_id):
        await _tenant(services, tenant_id)
        message = f"Tenant '{tenant_id}' has no key '{key_id}'."
        raise ApiError(404, message, type="invalid_request_error", code="key_not_found", param="key_id")
    return {"id": key_id, "object": "key.deleted", "deleted": True}


def _services(request: Request) -> Services:
    return request.app.state.services


async def _tenant(services: Services, tenant_id: str) -> Tenant:
    tenant = await services.tenants.get(tenant_id)
    if tenant is None:
        raise _no_tenant(tenant_id)
    return tenant


def _no_tenant(tenant_id: str) -> ApiError:
    message = f"There is no tenant '{tenant_id}'."
    return ApiError(404, message, type="invalid_request_error", code="tenant_not_found", param="tenant_id")


def _tenant_object(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.id,
        "object": "tenant",
        "name": tenant.name,
        "weight": tenant.weight,
        "prefix_sharing": tenant.prefix_sharing.value,
        "max_pinned_adapters": tenant.max_pinned_adapters,
        "suspended": tenant.suspended,
        "created": tenant.created,
    }


def _key_object(record: KeyRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "key",
        "tenant": record.tenant_id,
        "scopes": sorted(record.scopes),
        "created": record.created,
        "expires": record.expires or None,
        "expired": bool(record.expires) and record.expires <= time.time(),
        "note": record.note,
    }
