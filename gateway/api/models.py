"""`GET /v1/models`: the base model, the tenant's own adapters and those that others have granted it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from adapters.registry import AdapterVersion
from gateway.auth import Principal, require
from gateway.described import described
from gateway.resolve import check_base, may_use, model_not_found, nothing_is_live
from gateway.schemas.answers import Model, ModelList
from gateway.services import Services
from protos.engine_pb2 import ModelInfo

router = APIRouter(tags=["models"])

_OWNER = "loraplex"


@router.get("/v1/models")
@described(ModelList)
async def list_models(
    request: Request, caller: Annotated[Principal, Depends(require("inference"))]
) -> dict[str, Any]:
    """Lists what the caller may name as `model`."""
    services: Services = request.app.state.services
    data = [_base_object(info) for info in services.engines.models() if may_use(caller, info)]
    default = services.engines.model_info()
    if default is None or may_use(caller, default):  # every adapter runs on it
        parent = default.name if default else None
        own = [item.live for item in await services.registry.list(caller.tenant_id) if item.live]
        granted = await services.registry.grants.granted_to(caller.tenant_id)
        data += [_adapter_object(found, found.name, parent) for found in own]
        data += [_adapter_object(found, f"{found.tenant}/{found.name}", parent) for found in granted]
    return {"object": "list", "data": data}


@router.get("/v1/models/{name:path}")
@described(Model)
async def retrieve_model(
    name: str, request: Request, caller: Annotated[Principal, Depends(require("inference"))]
) -> dict[str, Any]:
    """Shows one model: the base, an adapter by its name, or one version of it as `name@3`.

    Another tenant's, if it is granted, is `owner/name`.
    """
    services: Services = request.app.state.services
    base = services.engines.model_info(name)
    if base is not None:
        if not may_use(caller, base):
            raise model_not_found(name)
        return _base_object(base)
    found = await services.models.find_adapter(name, caller)
    if found is None:
        raise model_not_found(name)
    default = services.engines.model_info()
    if default is not None:
        check_base(name, caller, default)
    if found.live is None:
        raise nothing_is_live(name)
    return _adapter_object(found.live, name, default.name if default else None)


def _base_object(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": 0,
        "owned_by": _OWNER,
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_model_len,
    }


def _adapter_object(adapter: AdapterVersion, name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(adapter.created_at),
        "owned_by": adapter.tenant,
        "root": adapter.ref,
        "parent": parent,
    }
