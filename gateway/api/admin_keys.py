"""`/admin/tenants/{id}/keys`: the API keys of a tenant. The text of one is answered once, when it is made."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import Path, Request

from gateway.api.admin_access import AdminOfTenant, PathTenant, actor_of, admin_router, find_tenant, no_tenant
from gateway.described import described
from gateway.errors import ApiError
from gateway.keys import KeyExpired, KeyRecord, NoSuchKey, NoSuchTenant
from gateway.limits import rates_from_mapping
from gateway.schemas.admin import CreateKey, RotateKey
from gateway.schemas.admin_answers import KeyDeleted, KeyList, NewKey
from gateway.services import Services

router = admin_router("/tenants/{tenant_id}/keys")

KeyId = Annotated[str, Path(max_length=64)]


@router.post("", status_code=201)
@described(NewKey)
async def create_key(
    tenant_id: PathTenant, body: CreateKey, request: Request, caller: AdminOfTenant
) -> dict[str, Any]:
    """Makes a key. Its text is in this answer and never again."""
    try:
        record, key = await _services(request).keys.create(
            tenant_id,
            scopes=body.scopes,
            expires_in=body.expires_in,
            note=body.note,
            limits=rates_from_mapping(body.limits.given()),
            by=actor_of(request, caller),
        )
    except NoSuchTenant:
        raise no_tenant(tenant_id) from None
    return {**_key_object(record), "key": key}


@router.get("")
@described(KeyList)
async def list_keys(tenant_id: PathTenant, request: Request, caller: AdminOfTenant) -> dict[str, Any]:
    """Lists a tenant's keys, without their secrets."""
    services = _services(request)
    await find_tenant(services, tenant_id)
    records = await services.keys.of_tenant(tenant_id)
    return {"object": "list", "data": [_key_object(record) for record in records]}


@router.post("/{key_id}/rotate", status_code=201)
@described(NewKey, errors=(409,))
async def rotate_key(
    tenant_id: PathTenant,
    key_id: KeyId,
    request: Request,
    caller: AdminOfTenant,
    body: RotateKey | None = None,
) -> dict[str, Any]:
    """Makes a key that may do what this one may; this one stops after `grace` seconds, or at once."""
    services = _services(request)
    try:
        record, key = await services.keys.rotate(
            tenant_id, key_id, grace_s=body.grace if body else 0, by=actor_of(request, caller)
        )
    except NoSuchKey:
        raise await _no_key(services, tenant_id, key_id) from None
    except KeyExpired:
        message = f"The key '{key_id}' has expired, so nobody uses it. Create a new one instead."
        raise ApiError(
            409, message, type="invalid_request_error", code="key_expired", param="key_id"
        ) from None
    return {**_key_object(record), "key": key}


@router.delete("/{key_id}")
@described(KeyDeleted)
async def revoke_key(
    tenant_id: PathTenant, key_id: KeyId, request: Request, caller: AdminOfTenant
) -> dict[str, Any]:
    """Revokes a key: it stops on every gateway within a second."""
    services = _services(request)
    if not await services.keys.revoke(tenant_id, key_id, by=actor_of(request, caller)):
        raise await _no_key(services, tenant_id, key_id)
    return {"id": key_id, "object": "key.deleted", "deleted": True}


async def _no_key(services: Services, tenant_id: str, key_id: str) -> ApiError:
    """Returns the 404 for a key that is not there; where its tenant is not either, that one's."""
    await find_tenant(services, tenant_id)
    message = f"Tenant '{tenant_id}' has no key '{key_id}'."
    return ApiError(404, message, type="invalid_request_error", code="key_not_found", param="key_id")


def _services(request: Request) -> Services:
    return request.app.state.services


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
        "limits": record.limits.to_mapping(),
    }
