"""What a tenant's name means: promote, rollback, canary, pin, rename, and the history of all that.

Each route answers with the name as it is then. Requests under way finish on the version they began with.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from adapters import lifecycle
from adapters.identity import InvalidName, check_name
from adapters.registry import AdapterNotFound
from gateway.accounts.moves import move_use_of_adapter
from gateway.adapter_objects import event_object, name_object, own_name
from gateway.api.admin_access import actor_of
from gateway.api.audited import audited_router
from gateway.auth import Principal, require
from gateway.described import described
from gateway.errors import invalid_request
from gateway.publication import store_faults
from gateway.schemas.adapter_answers import Adapter, AdapterHistory
from gateway.schemas.adapters import CanaryBody, PromoteBody, RenameBody
from gateway.services import Services

router = audited_router("/v1/adapters/{name}")

Caller = Annotated[Principal, Depends(require("adapters"))]


@router.post("/promote")
@described(Adapter, errors=(409,))
async def promote_adapter(
    name: str, request: Request, caller: Caller, body: PromoteBody | None = None
) -> dict[str, Any]:
    """Makes a version live: the given one, else the canary, else the newest. Ends a canary."""
    services: Services = request.app.state.services
    version = body.version if body else None
    await services.registry.aliases.promote(caller.tenant_id, own_name(name), version, by=caller.key_id)
    return await _changed(services, caller, name)


@router.post("/rollback")
@described(Adapter, errors=(409,))
async def roll_back_adapter(name: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Makes the version live that was so before this one; once more, the one before that. Ends a canary."""
    services: Services = request.app.state.services
    await services.registry.aliases.rollback(caller.tenant_id, own_name(name), by=caller.key_id)
    return await _changed(services, caller, name)


@router.put("/canary")
@described(Adapter, errors=(409,))
async def begin_canary(name: str, body: CanaryBody, request: Request, caller: Caller) -> dict[str, Any]:
    """Gives a version a share of the requests for the bare name."""
    services: Services = request.app.state.services
    await services.registry.aliases.canary(
        caller.tenant_id, own_name(name), body.version, body.percent, by=caller.key_id
    )
    return await _changed(services, caller, name)


@router.delete("/canary")
@described(Adapter, errors=(409,))
async def end_canary(name: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Gives all requests for the bare name to the live version again."""
    services: Services = request.app.state.services
    await services.registry.aliases.end_canary(caller.tenant_id, own_name(name), by=caller.key_id)
    return await _changed(services, caller, name)


@router.put("/pin")
@described(Adapter, errors=(409,))
async def pin_adapter(name: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Has engines keep the live version resident, whichever it is. 409 beyond the tenant's quota."""
    services: Services = request.app.state.services
    own = own_name(name)
    tenant = await services.tenants.get(caller.tenant_id)
    if tenant is None:
        raise AdapterNotFound(own)
    await services.registry.aliases.pin(
        caller.tenant_id,
        own,
        quota=tenant.max_pinned_adapters,
        most_pages=tenant.limits.pinned_pages,
        by=caller.key_id,
    )
    return await _changed(services, caller, name)


@router.delete("/pin")
@described(Adapter, errors=(409,))
async def unpin_adapter(name: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Lets engines evict it again."""
    services: Services = request.app.state.services
    await services.registry.aliases.unpin(caller.tenant_id, own_name(name), by=caller.key_id)
    return await _changed(services, caller, name)


@router.post("/rename")
@described(Adapter, errors=(409,))
async def rename_adapter(name: str, body: RenameBody, request: Request, caller: Caller) -> dict[str, Any]:
    """Gives all versions, with their numbers, aliases, grants and limits, another name."""
    services: Services = request.app.state.services
    own = own_name(name)
    try:
        target = check_name(body.name)
    except InvalidName as error:
        raise invalid_request(str(error), param="name", code="invalid_name") from None
    if services.engines.model_info(target) is not None:
        message = f"'{target}' is the base model's name. Choose another."
        raise invalid_request(message, param="name", code="invalid_name")
    async with store_faults():
        await lifecycle.rename(
            services.registry,
            services.store,
            tenant=caller.tenant_id,
            name=own,
            target=target,
            by=caller.key_id,
        )
    if own in caller.adapter_limits:
        await services.tenants.move_adapter_limits(
            caller.tenant_id, own, target, by=actor_of(request, caller)
        )
        await move_use_of_adapter(services.redis, caller.tenant_id, own, target)
    return await _shown(services, caller, target)


@router.get("/history")
@described(AdapterHistory)
async def show_history(name: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Lists what happened to a name, the latest first."""
    services: Services = request.app.state.services
    events = await services.registry.history(caller.tenant_id, own_name(name))
    if not events and await services.registry.show(caller.tenant_id, name) is None:
        raise AdapterNotFound(name)
    return {"object": "list", "data": [event_object(event) for event in events]}


async def _changed(services: Services, caller: Principal, name: str) -> dict[str, Any]:
    await lifecycle.record(services.registry, services.store, caller.tenant_id, name)
    return await _shown(services, caller, name)


async def _shown(services: Services, caller: Principal, name: str) -> dict[str, Any]:
    found = await services.registry.show(caller.tenant_id, name)
    if found is None:
        raise AdapterNotFound(name)
    return name_object(found)
