"""`POST /v1/adapter-pulls`: takes an adapter from the hub, where the operator allows it."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request

from gateway.adapter_objects import version_object
from gateway.api.audited import audited_router
from gateway.auth import Principal, require
from gateway.described import described
from gateway.errors import ApiError
from gateway.publication import check_upload_name, largest_upload, model_for_uploads, publish_folder, staged
from gateway.schemas.adapter_answers import AdapterVersion
from gateway.schemas.adapters import PullBody
from gateway.services import Services
from gateway.upload_sessions import UploadOptions

router = audited_router()


@router.post("/v1/adapter-pulls", status_code=201)
@described(AdapterVersion, errors=(404, 409, 502))
async def pull_adapter(
    body: PullBody, request: Request, caller: Principal = Depends(require("adapters"))
) -> dict[str, Any]:
    """Fetches an adapter's files from the hub, all of one commit, and makes them a new version of a name."""
    services: Services = request.app.state.services
    if services.hub is None:
        message = "This server takes no adapters from a hub. Upload the files, or ask your operator."
        raise ApiError(403, message, type="permission_error", code="pull_not_allowed")
    info = model_for_uploads(services, caller)
    options = UploadOptions(check_upload_name(services, body.name), body.allow_zero, body.promote)
    with services.upload_slots.taken(caller.tenant_id):
        async with staged(services.store) as staging:
            limit = largest_upload(services, info)
            hashes = await services.hub.fetch(body.repo, body.revision, staging.path, limit)
            staging.hashes.update(hashes)
            version = await publish_folder(services, staging, info, caller=caller, options=options)
    return version_object(version)
