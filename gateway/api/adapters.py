"""A tenant's adapters: list, show, delete. All names are within the tenant of the key."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Depends, Request

from adapters.registry import AdapterName, AdapterNotFound
from gateway.adapter_objects import name_object, own_name, own_ref, version_object
from gateway.adapter_removal import delete_adapter
from gateway.api.audited import audited_router
from gateway.auth import Principal, require
from gateway.described import described
from gateway.schemas.adapter_answers import AdapterDeleted, AdapterDetails, AdapterList
from gateway.services import Services

router = audited_router("/v1/adapters")

logger = logging.getLogger(__name__)


@router.get("")
@described(AdapterList)
async def list_adapters(request: Request, caller: Principal = Depends(require("adapters"))) -> dict[str, Any]:
    """Lists the tenant's adapters by name, each with its live version, and the bytes of all versions."""
    services: Services = request.app.state.services
    names = await services.registry.list(caller.tenant_id)
    used = await services.registry.bytes_of(caller.tenant_id)
    return {"object": "list", "data": [name_object(name) for name in names], "bytes": used}


@router.get("/{name}")
@described(AdapterDetails)
async def show_adapter(
    name: str, request: Request, caller: Principal = Depends(require("adapters"))
) -> dict[str, Any]:
    """Shows an adapter: its live version, all versions, and where and how the live one fares on engines."""
    services: Services = request.app.state.services
    found = await _shown(services, caller.tenant_id, name)
    shown = found.live or found.newest
    return {
        **name_object(found),
        "grants": list(found.grants),
        "versions": [version_object(version) for version in found.versions],
        "residency": services.engines.residency(shown.digest.hex()),
        "engines": await services.engines.adapter_states(shown.digest),
    }


@router.delete("/{name}")
@described(AdapterDeleted, errors=(409,))
async def remove_adapter(
    name: str, request: Request, caller: Principal = Depends(require("adapters"))
) -> dict[str, Any]:
    """Deletes an adapter with all its versions, or one of them as `name@3`. Requests under way finish."""
    services: Services = request.app.state.services
    own, version = own_ref(name)
    await delete_adapter(services, caller.tenant_id, own, version, by=caller.key_id)
    return {"id": name, "object": "adapter.deleted", "deleted": True}


async def _shown(services: Services, tenant_id: str, ref: str) -> AdapterName:
    found = await services.registry.show(tenant_id, own_name(ref))
    if found is None:
        raise AdapterNotFound(ref)
    return found
