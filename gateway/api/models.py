"""`GET /v1/models`: the base model and the tenant's own adapters."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from adapters.registry import AdapterVersion
from gateway.auth import Principal, require
from gateway.resolve import model_not_found
from gateway.services import Services
from protos.engine_pb2 import ModelInfo

router = APIRouter(tags=["models"])

_OWNER = "loraplex"


@router.get("/v1/models")
async def list_models(
    request: Request, caller: Annotated[Principal, Depends(require("inference"))]
) -> dict[str, Any]:
    """Lists what the caller may name as `model`."""
    services: Services = request.app.state.services
    bases = services.engines.models()
    adapters = await services.registry.list(caller.tenant_id)
    parent = bases[0].name if bases else None
    data = [_base_object(info) for info in bases] + [
        _adapter_object(found, found.name, parent) for found in adapters
    ]
    return {"object": "list", "data": data}


@router.get("/v1/models/{name:path}")
async def retrieve_model(
    name: str, request: Request, caller: Annotated[Principal, Depends(require("inference"))]
) -> dict[str, Any]:
    """Shows one model: the base, an adapter by its name, or one version of it as `name@3`."""
    services: Services = request.app.state.services
    base = services.engines.model_info(name)
    if base is not None:
        return _base_object(base)
    found = await services.models.find_adapter(name, caller)
    if found is None:
        raise model_not_found(name)
    default = services.engines.model_info()
    return _adapter_object(found, name, default.name if default else None)


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
        "root": f"{adapter.name}@{adapter.version}",
        "parent": parent,
    }
