"""`/admin/tenants`: the customers, their weights, limits and permissions, and what goes with them."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from fastapi import Query, Request

from adapters import lifecycle
from adapters.registry import AdapterNotFound
from gateway.adapter_removal import delete_adapter
from gateway.api.admin_access import (
    AdminOfTenant,
    Operator,
    PathTenant,
    actor_of,
    admin_router,
    find_tenant,
    no_tenant,
)
from gateway.audit import Actor, Change
from gateway.batches.upkeep import remove_file
from gateway.described import described
from gateway.errors import ApiError, invalid_request
from gateway.limits import InvalidLimit, tenant_limits_from_mapping
from gateway.publication import store_faults
from gateway.schemas.admin import CreateTenant, UpdateTenant
from gateway.schemas.admin_answers import (
    DoomedAdapter,
    TenantDeleted,
    TenantDeletion,
    TenantList,
)
from gateway.schemas.admin_answers import Tenant as TenantObject
from gateway.services import Services
from gateway.tenants import Tenant, TenantChanges, TenantExists, TenantRetired

router = admin_router("/tenants")


@router.post("", status_code=201)
@described(TenantObject, errors=(409,))
async def create_tenant(body: CreateTenant, request: Request, caller: Operator) -> dict[str, Any]:
    """Adds a tenant. 409 when the id is taken, or was a tenant's that is deleted."""
    try:
        tenant = await _services(request).tenants.create(
            body.name,
            tenant_id=body.id,
            weight=body.weight,
            prefix_sharing=body.prefix_sharing,
            max_pinned_adapters=body.max_pinned_adapters,
            limits=tenant_limits_from_mapping(body.limits.given()),
            base_models=body.base_models,
            by=actor_of(request, caller),
        )
    except TenantExists:
        fault = f"There is a tenant '{body.id}' already. Choose another id."
        raise _id_taken(fault, "tenant_exists") from None
    except TenantRetired:
        fault = f"The tenant '{body.id}' was deleted, and its usage is kept by this id. Choose another id."
        raise _id_taken(fault, "tenant_retired") from None
    return _tenant_object(tenant)


@router.get("")
@described(TenantList)
async def list_tenants(request: Request, caller: Operator) -> dict[str, Any]:
    """Lists all tenants, oldest first."""
    tenants = await _services(request).tenants.all()
    return {"object": "list", "data": [_tenant_object(tenant) for tenant in tenants]}


@router.get("/{tenant_id}")
@described(TenantObject)
async def show_tenant(tenant_id: PathTenant, request: Request, caller: AdminOfTenant) -> dict[str, Any]:
    """Shows one tenant."""
    return _tenant_object(await find_tenant(_services(request), tenant_id))


@router.patch("/{tenant_id}")
@described(TenantObject)
async def update_tenant(
    tenant_id: PathTenant, body: UpdateTenant, request: Request, caller: Operator
) -> dict[str, Any]:
    """Changes the given fields; every gateway follows within a second."""
    changes = TenantChanges(**body.given())
    try:
        tenant = await _services(request).tenants.update(tenant_id, changes, by=actor_of(request, caller))
    except InvalidLimit as error:
        raise invalid_request(str(error), param=error.name, code="invalid_value") from None
    if tenant is None:
        raise no_tenant(tenant_id)
    return _tenant_object(tenant)


@router.delete("/{tenant_id}")
@described(TenantDeleted | TenantDeletion)
async def delete_tenant(
    tenant_id: PathTenant,
    request: Request,
    caller: Operator,
    dry_run: Annotated[bool, Query(description="Only say what would go.")] = False,
) -> dict[str, Any]:
    """Deletes a tenant with its keys and adapters, and says which these were; with `dry_run`, which they are.

    Its files and batches go, too. A call that was cut short can be made again to finish, also when the tenant
    itself is gone by then.
    """
    services, actor = _services(request), actor_of(request, caller)
    if not await services.tenants.is_retired(tenant_id):
        await find_tenant(services, tenant_id)
    if dry_run:
        return await _deletion(services, tenant_id)
    await services.tenants.update(tenant_id, {"suspended": True}, by=actor)
    keys, adapters = await _delete_possessions(services, tenant_id, actor)
    await services.tenants.delete(tenant_id, by=actor)
    await _delete_possessions(services, tenant_id, actor)  # what a call in flight added meanwhile
    async with store_faults():
        await lifecycle.forget_tenant(services.registry, services.store, tenant_id)
    return {"id": tenant_id, "object": "tenant.deleted", "deleted": True, "keys": keys, "adapters": adapters}


async def _deletion(services: Services, tenant_id: str) -> dict[str, Any]:
    """What goes with the tenant. Others lose the adapters that it grants them."""
    names = [item.name for item in await services.registry.list(tenant_id)]
    shown = [await services.registry.show(tenant_id, name) for name in names]
    doomed = [
        DoomedAdapter(
            name=item.name,
            versions=[version.version for version in item.versions],
            live=item.live.version if item.live else None,
            pinned=item.pinned,
            grants=list(item.grants),
        )
        for item in shown
        if item is not None
    ]
    granted = await services.registry.grants.granted_to(tenant_id)
    return {
        "id": tenant_id,
        "object": "tenant.deletion",
        "deleted": False,
        "keys": [record.id for record in await services.keys.of_tenant(tenant_id)],
        "adapters": doomed,
        "bytes": await services.registry.bytes_of(tenant_id),
        "files": await services.files.count(tenant_id),
        "file_bytes": await services.files.used_bytes(tenant_id),
        "batches": await services.batches.open_of(tenant_id),
        "granted": [f"{version.tenant}/{version.name}" for version in granted],
    }


async def _delete_possessions(
    services: Services, tenant_id: str, actor: Actor
) -> tuple[list[str], list[str]]:
    """Deletes all that a tenant has. Returns the keys' ids and the adapters' names."""
    keys = [record.id for record in await services.keys.of_tenant(tenant_id)]
    for key_id in keys:
        await services.keys.revoke(tenant_id, key_id, by=actor)
    adapters = [item.name for item in await services.registry.list(tenant_id)]
    for name in adapters:
        with suppress(AdapterNotFound):
            await delete_adapter(services, tenant_id, name)
            await services.audit.append(Change("adapter.delete", tenant_id, name, {}, {}), actor)
    await services.batches.forget_tenant(tenant_id)
    for file_id in await services.files.of_tenant(tenant_id):
        async with store_faults():
            await remove_file(services.files, services.file_store, tenant_id, file_id, even_in_use=True)
    return keys, adapters


def _id_taken(message: str, code: str) -> ApiError:
    return ApiError(409, message, type="invalid_request_error", code=code, param="id")


def _services(request: Request) -> Services:
    return request.app.state.services


def _tenant_object(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.id,
        "object": "tenant",
        "name": tenant.name,
        "weight": tenant.weight,
        "prefix_sharing": tenant.prefix_sharing.value,
        "max_pinned_adapters": tenant.max_pinned_adapters,
        "suspended": tenant.suspended,
        "limits": tenant.limits.to_mapping(),
        "adapter_limits": {name: rates.to_mapping() for name, rates in tenant.adapter_limits.items()},
        "base_models": None if tenant.base_models is None else sorted(tenant.base_models),
        "created": tenant.created,
    }
