"""Uploads of adapters: in one form, or file by file, so that what broke off goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from adapters.adapter_files import check_complete, is_adapter_file, is_weights, size_limit
from adapters.blob_store import Staging
from adapters.errors import InvalidAdapter
from adapters.store_threads import in_store_thread
from gateway.adapter_objects import version_object
from gateway.api.audited import audited_router
from gateway.auth import Principal, require
from gateway.described import described
from gateway.errors import ApiError, invalid_request
from gateway.publication import (
    UploadOptions,
    check_room,
    check_upload_name,
    largest_upload,
    model_for_uploads,
    publish_folder,
    publish_known,
    staged,
    store_faults,
)
from gateway.schemas.adapter_answers import (
    AdapterForm,
    AdapterVersion,
    CompleteUpload,
    OpenUpload,
    UploadDeleted,
    UploadProgress,
)
from gateway.schemas.adapters import UploadBody
from gateway.services import Services
from gateway.upload_sessions import ExpectedFile, UploadSession, describe
from gateway.upload_transfers import OFFSET_HEADER, upload_not_found
from gateway.uploads import Upload, receive_upload

router = audited_router()


@router.post("/v1/adapters", status_code=201)
@described(AdapterVersion, body=AdapterForm, body_media="multipart/form-data", errors=(409,))
async def upload_adapter(
    request: Request, caller: Principal = Depends(require("adapters"))
) -> dict[str, Any]:
    """Takes an adapter in PEFT's format, in one form, and makes it a new version of a name.

    multipart/form-data with the field `name`, the adapter's files as `files`, and optionally
    `allow_zero=true` and `promote=false`. What is not right in every detail is refused, and leaves nothing.
    """
    services: Services = request.app.state.services
    info = model_for_uploads(services, caller)
    with services.upload_slots.taken(caller.tenant_id):
        async with staged(services.store) as staging:
            upload = await _receive(request, staging.path, largest_upload(services, info))
            options = _options_of(services, upload.fields)
            staging.hashes.update(upload.hashes)
            version = await publish_folder(services, staging, info, caller=caller, options=options)
    return version_object(version)


@router.post("/v1/adapter-uploads", status_code=201)
@described(OpenUpload | CompleteUpload, errors=(409,))
async def begin_upload(
    body: UploadBody, request: Request, response: Response, caller: Principal = Depends(require("adapters"))
) -> Mapping[str, Any]:
    """Begins an upload, or finds the one of the same files that broke off: `offset` says what is there.

    Where the tenant has a version of exactly these files already, nothing needs to be sent: the upload is
    complete at once, and `adapter` is the new version.
    """
    services: Services = request.app.state.services
    info = model_for_uploads(services, caller)
    options = UploadOptions(check_upload_name(services, body.name), body.allow_zero, body.promote)
    files = [ExpectedFile(file.name, file.bytes, file.sha256) for file in body.files]
    _check_files(files, largest_upload(services, info))
    hashes = {file.name: file.sha256 for file in files}
    version = await publish_known(services, info, hashes, caller=caller, options=options)
    if version is not None:
        return {
            "object": "adapter.upload",
            "status": "complete",
            "name": options.name,
            "adapter": version_object(version),
        }
    await check_room(services, caller, options.name, files)
    async with store_faults():
        session = await in_store_thread(services.upload_sessions.open, caller.tenant_id, options, files)
        return await in_store_thread(describe, session, status="open")


@router.get("/v1/adapter-uploads/{upload_id}")
@described(OpenUpload)
async def show_upload(
    upload_id: str, request: Request, caller: Principal = Depends(require("adapters"))
) -> Mapping[str, Any]:
    """Shows an upload that is not complete, and how much of each file has arrived."""
    session = await _session(request, caller, upload_id)
    return await in_store_thread(describe, session, status="open")


@router.patch("/v1/adapter-uploads/{upload_id}/{file_name}")
@described(
    UploadProgress,
    body=bytes,
    body_media="application/octet-stream",
    headers=(OFFSET_HEADER,),
    errors=(409,),
)
async def append_to_upload(
    upload_id: str, file_name: str, request: Request, caller: Principal = Depends(require("adapters"))
) -> JSONResponse:
    """Appends the body to a file, from the offset in the header `Upload-Offset`. What arrives stays."""
    services: Services = request.app.state.services
    session = await _session(request, caller, upload_id)
    file = session.file(file_name)
    if file is None:
        raise invalid_request("This upload has no such file.", param="files", code="invalid_upload")
    offset = request.headers.get(OFFSET_HEADER, "")
    if not offset.isdecimal() or len(offset) > 18:
        message = f"The header {OFFSET_HEADER} says at which byte of the file the body begins."
        raise invalid_request(message, param=OFFSET_HEADER, code="invalid_value")
    with services.upload_slots.taken(caller.tenant_id):
        async with store_faults():
            await services.upload_transfers.append(session, file, int(offset), request.stream())
    answer = {
        "id": session.id,
        "object": "adapter.upload",
        "file": file.name,
        "offset": session.offset(file.name),
    }
    return JSONResponse(answer, headers={OFFSET_HEADER: str(answer["offset"])})


@router.post("/v1/adapter-uploads/{upload_id}/complete", status_code=201)
@described(AdapterVersion, errors=(409,))
async def complete_upload(
    upload_id: str, request: Request, caller: Principal = Depends(require("adapters"))
) -> dict[str, Any]:
    """Makes an upload whose files are all there a new version of its name. Then it has ended. It has as well
    when its files are no adapter; after any other fault it may be completed later.
    """
    services: Services = request.app.state.services
    info = model_for_uploads(services, caller)
    session = await _session(request, caller, upload_id)
    with (
        services.upload_slots.taken(caller.tenant_id),
        services.upload_transfers.completing(session),
    ):
        async with staged(services.store) as staging:
            await _copy_arrived(services, session, staging)
            try:
                version = await publish_folder(
                    services, staging, info, caller=caller, options=session.options
                )
            except ApiError as error:
                if error.status < 500:
                    await _end(services, caller, session)
                raise
            await _end(services, caller, session)
    return version_object(version)


@router.delete("/v1/adapter-uploads/{upload_id}")
@described(UploadDeleted)
async def give_up_upload(
    upload_id: str, request: Request, caller: Principal = Depends(require("adapters"))
) -> dict[str, Any]:
    """Gives an upload up, and removes what has arrived of it."""
    services: Services = request.app.state.services
    session = await _session(request, caller, upload_id)
    async with store_faults():
        await _end(services, caller, session)
    return {"id": session.id, "object": "adapter.upload.deleted", "deleted": True}


async def _receive(request: Request, folder: Path, max_bytes: int) -> Upload:
    try:
        return await receive_upload(
            request.stream(),
            content_type=request.headers.get("content-type", ""),
            content_length=request.headers.get("content-length"),
            folder=folder,
            max_bytes=max_bytes,
        )
    except ClientDisconnect:
        raise invalid_request("The client went away during the upload.", code="upload_aborted") from None


def _options_of(services: Services, fields: Mapping[str, str]) -> UploadOptions:
    name = check_upload_name(services, fields["name"])
    flags = {"allow_zero": fields.get("allow_zero", "false"), "promote": fields.get("promote", "true")}
    for param, value in flags.items():
        if value not in ("true", "false"):
            raise invalid_request(f"The field '{param}' is either 'true' or 'false'.", param=param)
    return UploadOptions(name, flags["allow_zero"] == "true", flags["promote"] == "true")


def _check_files(files: list[ExpectedFile], max_weights_bytes: int) -> None:
    """Raises ApiError for files that can never become an adapter, before a byte of them is sent."""
    names = [file.name for file in files]
    weights = sum(file.bytes for file in files if is_weights(file.name))
    for file in files:
        if not is_adapter_file(file.name):
            message = f"The file {file.name[:80]!a} is no part of an adapter. Pickled weights are never read."
            raise invalid_request(message, param="files", code="invalid_upload")
        limit = size_limit(file.name, max_weights_bytes)
        if file.bytes > limit or weights > max_weights_bytes:
            message = f"The file '{file.name}' is larger than {limit:,} bytes, the most that is taken."
            raise ApiError(413, message, type="invalid_request_error", code="upload_too_large", param="files")
    if len(set(names)) != len(names):
        raise invalid_request("A file is named twice.", param="files", code="invalid_upload")
    try:
        check_complete(names)
    except InvalidAdapter as error:
        raise invalid_request(error.message, param="files", code="invalid_upload") from None


async def _session(request: Request, caller: Principal, upload_id: str) -> UploadSession:
    """The caller's session. Raises ApiError 404, the same whether there is none or it is another tenant's."""
    services: Services = request.app.state.services
    session = await in_store_thread(services.upload_sessions.find, caller.tenant_id, upload_id)
    if session is None:
        raise upload_not_found()
    await in_store_thread(session.touch)
    return session


async def _copy_arrived(services: Services, session: UploadSession, staging: Staging) -> None:
    """Raises ApiError 409 unless every file is there and is what was announced; a wrong one begins anew."""
    for file in session.files:
        offset = await in_store_thread(session.offset, file.name)
        if offset < file.bytes:
            raise _conflict(
                "upload_incomplete",
                f"Of the file '{file.name}', {offset} of {file.bytes} bytes have arrived.",
            )
    for file in session.files:
        if await services.upload_transfers.copy(session, file, staging.path) != file.sha256:
            await in_store_thread((session.folder / file.name).unlink, missing_ok=True)
            raise _conflict(
                "hash_mismatch", f"The file '{file.name}' is not the one that was announced: send it again."
            )
    staging.hashes.update(session.hashes)


async def _end(services: Services, caller: Principal, session: UploadSession) -> None:
    await in_store_thread(services.upload_sessions.remove, caller.tenant_id, session)


def _conflict(code: str, message: str) -> ApiError:
    return ApiError(409, message, type="invalid_request_error", code=code, param="files")
