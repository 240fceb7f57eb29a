"""A tenant's adapters: upload, list, show, delete. All names are within the tenant of the key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Depends, Request
from starlette.requests import ClientDisconnect

from adapters import lifecycle
from adapters.blob_store import BlobStore, Staging
from adapters.identity import InvalidName, check_name
from adapters.peft_format import BaseModelShape
from adapters.registry import AdapterName, AdapterNotFound, AdapterVersion
from adapters.validation import AdapterSummary, InvalidAdapter, largest_weights_file, validate
from gateway.adapter_objects import name_object, own_name, own_ref, version_object
from gateway.adapter_removal import delete_adapter
from gateway.auth import Principal, require
from gateway.base_shape import shape_of
from gateway.errors import ApiError, invalid_request, unavailable
from gateway.services import Services
from gateway.uploads import Upload, receive_upload

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])

logger = logging.getLogger(__name__)


@router.post("", status_code=201)
async def upload_adapter(
    request: Request, caller: Principal = Depends(require("adapters"))
) -> dict[str, Any]:
    """Takes an adapter in PEFT's format and makes it the name's live version.

    multipart/form-data with the field `name`, the files `adapter_config.json`
    and `adapter_model.safetensors` as `files`, and optionally `allow_zero=true`.
    What is not right in every detail is refused, and leaves nothing.
    """
    services: Services = request.app.state.services
    info = services.engines.model_info()
    if info is None:
        raise unavailable("No engine has shown its model yet, so no adapter can be checked against it.")
    shape = shape_of(info)
    async with _staging(services.store) as staging:
        upload = await _receive(request, staging.path, shape, services.settings.max_adapter_bytes)
        name, allow_zero = _checked_fields(upload.fields)
        if services.engines.model_info(name) is not None:
            message = f"'{name}' is the base model's name. Choose another."
            raise invalid_request(message, param="name", code="invalid_name")
        summary = await _validate(staging.path, shape, allow_zero)
        version = await _publish(services, staging, caller.tenant_id, name, summary)
    return version_object(version)


@router.get("")
async def list_adapters(request: Request, caller: Principal = Depends(require("adapters"))) -> dict[str, Any]:
    """Lists the tenant's adapters by name, each with its live version, and the bytes of all versions."""
    services: Services = request.app.state.services
    names = await services.registry.list(caller.tenant_id)
    used = await services.registry.bytes_of(caller.tenant_id)
    return {"object": "list", "data": [name_object(name) for name in names], "bytes": used}


@router.get("/{name}")
async def show_adapter(
    name: str, request: Request, caller: Principal = Depends(require("adapters"))
) -> dict[str, Any]:
    """Shows an adapter: its live version, all versions, and which engines hold the live one where."""
    services: Services = request.app.state.services
    found = await _shown(services, caller.tenant_id, name)
    shown = found.live or found.newest
    return {
        **name_object(found),
        "grants": list(found.grants),
        "versions": [version_object(version) for version in found.versions],
        "residency": services.engines.residency(shown.digest.hex()),
    }


@router.delete("/{name}")
async def remove_adapter(
    name: str, request: Request, caller: Principal = Depends(require("adapters"))
) -> dict[str, Any]:
    """Deletes an adapter with all its versions, or one of them as `name@3`. Requests under way finish."""
    services: Services = request.app.state.services
    own, version = own_ref(name)
    await delete_adapter(services, caller.tenant_id, own, version, by=caller.key_id)
    return {"id": name, "object": "adapter.deleted", "deleted": True}


@asynccontextmanager
async def _staging(store: BlobStore) -> AsyncIterator[Staging]:
    """A staging folder, made and removed off the event loop: to unlink gigabytes takes a while.

    Raises ApiError 503 when the store's disk fails meanwhile.
    """
    try:
        staging = await asyncio.to_thread(store.stage)
        try:
            yield staging
        finally:
            await asyncio.to_thread(staging.discard)
    except OSError as error:
        logger.error("an upload failed at the store: %s", error)
        message = "The server cannot store an upload at the moment. Try again later, or tell your operator."
        raise unavailable(message, retry_after_s=60, code="store_unavailable") from error


async def _receive(request: Request, folder: Path, shape: BaseModelShape, max_bytes: int) -> Upload:
    try:
        return await receive_upload(
            request.stream(),
            content_type=request.headers.get("content-type", ""),
            content_length=request.headers.get("content-length"),
            folder=folder,
            max_bytes=min(max_bytes, largest_weights_file(shape)),
        )
    except ClientDisconnect:
        raise invalid_request("The client went away during the upload.", code="upload_aborted") from None


def _checked_fields(fields: Mapping[str, str]) -> tuple[str, bool]:
    """Returns the name and `allow_zero`."""
    try:
        name = check_name(fields["name"])
    except InvalidName as error:
        raise invalid_request(str(error), param="name", code="invalid_name") from None
    allow_zero = fields.get("allow_zero", "false")
    if allow_zero not in ("true", "false"):
        raise invalid_request("The field 'allow_zero' is either 'true' or 'false'.", param="allow_zero")
    return name, allow_zero == "true"


async def _validate(folder: Path, shape: BaseModelShape, allow_zero: bool) -> AdapterSummary:
    # In anyio's threads, not asyncio's own, where prompts are tokenised: uploads must not hold those up.
    try:
        return await anyio.to_thread.run_sync(lambda: validate(folder, shape, allow_zero=allow_zero))
    except InvalidAdapter as error:
        raise invalid_request(error.message, param=error.field_or_tensor, code="invalid_adapter") from None


async def _publish(
    services: Services, staging: Staging, tenant_id: str, name: str, summary: AdapterSummary
) -> AdapterVersion:
    version = await lifecycle.publish(
        services.registry, services.store, staging, tenant=tenant_id, name=name, summary=summary
    )
    if await services.tenants.get(tenant_id) is None:
        # The tenant was deleted during the upload; who deleted it did not see this adapter.
        await delete_adapter(services, tenant_id, name)
        raise ApiError(403, "This tenant has been deleted.", type="permission_error", code="tenant_deleted")
    return version


async def _shown(services: Services, tenant_id: str, ref: str) -> AdapterName:
    found = await services.registry.show(tenant_id, own_name(ref))
    if found is None:
        raise AdapterNotFound(ref)
    return found
