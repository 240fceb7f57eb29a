"""`/v1/batches`: requests of a file, answered in what other work leaves over."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from gateway.api.counted import count_file_calls
from gateway.api.files import After, Caller, file_not_found, too_many_files, unknown_cursor
from gateway.auth import Principal, require
from gateway.batches.batch import Batch
from gateway.batches.files import MAX_FILES
from gateway.batches.pages import UnknownCursor
from gateway.batches.store import MAX_OPEN, NoInputFile, TooManyBatches
from gateway.described import described
from gateway.errors import ApiError, invalid_request
from gateway.schemas.batches import Batch as BatchObject
from gateway.schemas.batches import BatchList, CreateBatch
from gateway.services import Services

router = APIRouter(
    prefix="/v1/batches",
    tags=["batches"],
    dependencies=[Depends(require("inference")), Depends(count_file_calls)],
)


@router.post("")
@described(BatchObject, errors=(404, 409))
async def create_batch(body: CreateBatch, request: Request, caller: Caller) -> dict[str, Any]:
    """Begins a batch. Its lines are checked first; when one is wrong, none runs."""
    services: Services = request.app.state.services
    source = await services.files.find(caller.tenant_id, body.input_file_id)
    if source is None:
        raise file_not_found(body.input_file_id, "input_file_id")
    if source.purpose != "batch":
        message = f"The file has the purpose '{source.purpose}': a batch reads one with the purpose 'batch'."
        raise invalid_request(message, param="input_file_id", code="invalid_purpose")
    await _check_room(services, caller)
    now = int(time.time())
    batch = Batch(
        tenant=caller.tenant_id,
        id=f"batch_{secrets.token_hex(12)}",
        key=caller.key_id,
        endpoint=body.endpoint,
        input_file_id=source.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + body.hours * 3600,
        output_kept_s=body.output_kept_s,
        metadata=body.metadata or {},
    )
    try:
        await services.batches.create(batch)
    except NoInputFile:
        raise file_not_found(body.input_file_id, "input_file_id") from None
    except TooManyBatches:
        raise ApiError(
            429,
            f"This tenant has {MAX_OPEN} batches that have not ended, the most that is allowed.",
            type="rate_limit_error",
            code="too_many_batches",
            headers={"Retry-After": "60"},
        ) from None
    return batch.to_dict()


@router.get("")
@described(BatchList)
async def list_batches(
    request: Request,
    caller: Caller,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100, description="The most that is listed.")] = 20,
) -> dict[str, Any]:
    """Lists the tenant's batches, the newest first."""
    services: Services = request.app.state.services
    try:
        page = await services.batches.page(caller.tenant_id, after=after, limit=limit)
    except UnknownCursor:
        raise unknown_cursor() from None
    return page.to_dict()


@router.get("/{batch_id}")
@described(BatchObject)
async def show_batch(batch_id: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Shows how far a batch is."""
    return (await _batch(request, caller, batch_id)).to_dict()


@router.post("/{batch_id}/cancel")
@described(BatchObject, errors=(409,))
async def cancel_batch(batch_id: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Ends a batch early. What was answered by then is in its output file."""
    services: Services = request.app.state.services
    batch = await _batch(request, caller, batch_id)
    if not await services.batches.cancel(caller.tenant_id, batch.id):
        message = f"A batch whose status is '{batch.status}' cannot be cancelled."
        raise ApiError(
            409, message, type="invalid_request_error", code="batch_not_cancellable", param="batch_id"
        )
    return (await _batch(request, caller, batch_id)).to_dict()


async def _check_room(services: Services, caller: Principal) -> None:
    """Raises ApiError 409 where what batches wrote is more than the tenant may have: no answer is refused for
    that, so the next batch is.
    """
    if await services.files.count(caller.tenant_id) > MAX_FILES:
        raise too_many_files()
    most = caller.limits.file_bytes
    used = await services.files.used_bytes(caller.tenant_id) if most is not None else 0
    if most is not None and used > most:
        raise ApiError(
            409,
            f"This tenant's files take {used:,} bytes and may take {most:,}. Delete what you no longer need, "
            "or ask your operator for more.",
            type="invalid_request_error",
            code="file_bytes_quota_exceeded",
            param="input_file_id",
        )


async def _batch(request: Request, caller: Principal, batch_id: str) -> Batch:
    """The caller's batch. Raises ApiError 404, the same whether there is none or it is another tenant's."""
    services: Services = request.app.state.services
    found = await services.batches.find(caller.tenant_id, batch_id)
    if found is None:
        message = f"There is no batch {batch_id[:64]!a}."
        raise ApiError(404, message, type="invalid_request_error", code="batch_not_found", param="batch_id")
    return found
