"""`/v1/files`: what tenants keep here for batches, and what batches have written."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from adapters.blob_store import StoreUnavailable
from adapters.file_store import FileStore
from adapters.store_threads import in_store_thread
from gateway.api.counted import count_file_calls
from gateway.auth import Principal, require
from gateway.batches.files import (
    KEPT_S,
    MAX_FILES,
    FileInUse,
    QuotaExceeded,
    StoredFile,
    TooManyFiles,
    new_file,
)
from gateway.batches.form import IncomingForm, received_form
from gateway.batches.pages import UnknownCursor
from gateway.batches.upkeep import remove_file
from gateway.described import described
from gateway.downloads import Download, holding
from gateway.errors import ApiError, invalid_request
from gateway.publication import store_faults
from gateway.schemas.batches import File, FileDeleted, FileForm, FileList
from gateway.services import Services

router = APIRouter(
    prefix="/v1/files",
    tags=["batches"],
    dependencies=[Depends(require("inference")), Depends(count_file_calls)],
)

Caller = Annotated[Principal, Depends(require("inference"))]
After = Annotated[str | None, Query(max_length=64, description="The id that the page begins after.")]

_PIECE_BYTES = 1024 * 1024


@router.post("")
@described(File, body=FileForm, body_media="multipart/form-data", errors=(409,))
async def upload_file(request: Request, caller: Caller) -> dict[str, Any]:
    """Takes a file of JSON lines, in a form, to make a batch of."""
    services: Services = request.app.state.services
    with services.upload_slots.taken(caller.tenant_id):
        async with received_form(request, default_kept_s=KEPT_S) as form:
            await _check_room(services, caller, form.bytes)
            file = new_file(caller.tenant_id, form.filename, "batch", form.bytes, form.kept_s)
            async with store_faults():
                await in_store_thread(_put, services.file_store, file, form)
    try:
        await services.files.add(file, most_bytes=caller.limits.file_bytes)
    except QuotaExceeded as error:
        await in_store_thread(services.file_store.delete, file.name)
        raise _no_room(caller, error.used, file.bytes) from None
    except TooManyFiles:
        await in_store_thread(services.file_store.delete, file.name)
        raise too_many_files() from None
    return file.to_dict()


@router.get("")
@described(FileList)
async def list_kept_files(
    request: Request,
    caller: Caller,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The most that is listed.")] = 1000,
    order: Annotated[Literal["asc", "desc"], Query(description="By when they were made.")] = "desc",
    purpose: Annotated[
        Literal["batch", "batch_output"] | None, Query(description="Only those for this.")
    ] = None,
) -> dict[str, Any]:
    """Lists the tenant's files."""
    services: Services = request.app.state.services
    try:
        page = await services.files.page(
            caller.tenant_id, after=after, limit=limit, newest_first=order == "desc", purpose=purpose
        )
    except UnknownCursor:
        raise unknown_cursor() from None
    return page.to_dict()


@router.get("/{file_id}")
@described(File)
async def show_file(file_id: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Shows one file."""
    return (await _file(request, caller, file_id)).to_dict()


@router.get("/{file_id}/content")
@described(media={"application/octet-stream": None})
async def read_file_content(file_id: str, request: Request, caller: Caller) -> StreamingResponse:
    """Sends what is in a file."""
    services: Services = request.app.state.services
    file = await _file(request, caller, file_id)
    store = services.file_store
    async with holding(services.download_slots.taken(caller.tenant_id)) as held:
        async with store_faults():
            first = await _piece(store, file, 0)
        pieces = _pieces(store, file, first)
        return Download(pieces, headers={"Content-Length": str(file.bytes)}, held=held.pop_all())


@router.delete("/{file_id}")
@described(FileDeleted, errors=(409,))
async def delete_file(file_id: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Removes a file. 409 while a batch reads it."""
    services: Services = request.app.state.services
    file = await _file(request, caller, file_id)
    try:
        async with store_faults():
            await remove_file(services.files, services.file_store, caller.tenant_id, file.id)
    except FileInUse:
        message = "A batch that has not ended reads this file. Cancel it first, or wait for its end."
        raise ApiError(
            409, message, type="invalid_request_error", code="file_in_use", param="file_id"
        ) from None
    return {"id": file.id, "object": "file", "deleted": True}


def file_not_found(file_id: str, param: str = "file_id") -> ApiError:
    """Returns the 404 for a file that the tenant does not have."""
    message = f"There is no file {file_id[:64]!a}."
    return ApiError(404, message, type="invalid_request_error", code="file_not_found", param=param)


def too_many_files() -> ApiError:
    """Returns the 409 for a tenant with as many files as it may have."""
    message = (
        f"This tenant has {MAX_FILES:,} files, the most that are kept. Delete files that you no longer need, "
        "or let them expire sooner: 'expires_after', and a batch's 'output_expires_after'."
    )
    return ApiError(409, message, type="invalid_request_error", code="too_many_files")


def unknown_cursor() -> ApiError:
    """Returns the 400 for an `after` that is not in the list."""
    return invalid_request("'after' is no id of this list.", param="after", code="invalid_value")


async def _file(request: Request, caller: Principal, file_id: str) -> StoredFile:
    services: Services = request.app.state.services
    found = await services.files.find(caller.tenant_id, file_id)
    if found is None:
        raise file_not_found(file_id)
    return found


def _put(store: FileStore, file: StoredFile, form: IncomingForm) -> None:
    """Brings what has come into the store. Blocks."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        form.content.seek(0)
        with path.open("wb") as target:
            shutil.copyfileobj(form.content, target, _PIECE_BYTES)
        store.put(file.name, path)


async def _pieces(store: FileStore, file: StoredFile, first: bytes) -> AsyncIterator[bytes]:
    yield first
    for start in range(len(first), file.bytes, _PIECE_BYTES):
        yield await _piece(store, file, start)


async def _piece(store: FileStore, file: StoredFile, start: int) -> bytes:
    length = min(_PIECE_BYTES, file.bytes - start)
    piece = await in_store_thread(store.read, file.name, start, length)
    if len(piece) != length:
        raise StoreUnavailable(f"The file {file.name} in the store has been cut. Put it back from a backup.")
    return piece


async def _check_room(services: Services, caller: Principal, more: int) -> None:
    """Refuses what has no room before it is stored; what counts is what `add` says then."""
    if await services.files.count(caller.tenant_id) >= MAX_FILES:
        raise too_many_files()
    most = caller.limits.file_bytes
    used = await services.files.used_bytes(caller.tenant_id) if most is not None else 0
    if most is not None and used + more > most:
        raise _no_room(caller, used, more)


def _no_room(caller: Principal, used: int, more: int) -> ApiError:
    message = (
        f"This tenant's files take {used:,} of the {caller.limits.file_bytes or 0:,} bytes that they may, "
        f"and this one takes {more:,} more. Delete files that you no longer need, or ask your operator for "
        "more."
    )
    return ApiError(
        409, message, type="invalid_request_error", code="file_bytes_quota_exceeded", param="file"
    )
