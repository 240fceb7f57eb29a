"""`GET /v1/adapter-base`: what an adapter must fit, for checks before an upload."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from gateway.auth import Principal, require
from gateway.base_shape import shape_object
from gateway.described import described
from gateway.publication import model_for_uploads
from gateway.schemas.adapter_answers import AdapterBase
from gateway.services import Services

router = APIRouter(tags=["adapters"])


@router.get("/v1/adapter-base")
@described(AdapterBase)
async def show_base(
    request: Request, caller: Annotated[Principal, Depends(require("adapters"))]
) -> dict[str, Any]:
    """Shows the base model's layers and sizes, and the largest rank that is served."""
    services: Services = request.app.state.services
    return shape_object(model_for_uploads(services, caller))
