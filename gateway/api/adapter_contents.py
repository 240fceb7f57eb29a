"""What versions hold: the difference between two, and their files to take away."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE, is_adapter_file
from adapters.base_model import BaseModelShape
from adapters.blob_store import BlobNotFound, BlobStore, CorruptBlob, describe_files
from adapters.comparison import changed_fields, compare, describe
from adapters.errors import InvalidAdapter
from adapters.identity import DIGEST_FORMAT, MAX_VERSION
from adapters.layout import AdapterLayout
from adapters.model_ref import ModelRef
from adapters.reader import read_layout
from adapters.registry import AdapterConflict, AdapterNotFound, AdapterVersion
from adapters.store_threads import in_store_thread
from gateway.adapter_objects import own_name, own_ref, version_object
from gateway.api.counted import count_management
from gateway.auth import Principal, require
from gateway.base_shape import shape_of
from gateway.described import described
from gateway.downloads import Download, holding
from gateway.errors import ApiError, invalid_request, unavailable
from gateway.publication import model_for_uploads
from gateway.schemas.adapter_answers import AdapterDiff, AdapterFiles
from gateway.services import Services

router = APIRouter(
    prefix="/v1/adapters/{name}",
    tags=["adapters"],
    dependencies=[Depends(require("adapters")), Depends(count_management)],
)

Caller = Annotated[Principal, Depends(require("adapters"))]

logger = logging.getLogger(__name__)

_SAME_FOR_ALL = ("id", "version", "created", "object", "name")


@router.get("/diff")
@described(AdapterDiff, errors=(409,))
async def compare_versions(
    name: str,
    request: Request,
    caller: Caller,
    before: Annotated[int, Query(alias="from", ge=1, le=MAX_VERSION)],
    after: Annotated[int | None, Query(alias="to", ge=1, le=MAX_VERSION)] = None,
) -> dict[str, Any]:
    """Says what differs between two versions; `to` is the live one unless it is given.

    `changed` has the fields that differ. `modules` has, over all layers, the norm of each module's update in
    both versions and of what lies between them.
    """
    services: Services = request.app.state.services
    own = own_name(name)
    first = await _version(services, caller, own, before)
    second = await _version(services, caller, own, after)
    objects = [version_object(version) for version in (first, second)]
    fields: list[dict[str, Any]] = [
        {key: value for key, value in shown.items() if key not in _SAME_FOR_ALL} for shown in objects
    ]
    modules: list[dict[str, Any]] = []
    if first.digest != second.digest:
        shape = shape_of(model_for_uploads(services, caller))
        # It reads as much as two uploads, and works in the threads that everybody's uploads need.
        with services.upload_slots.taken(caller.tenant_id):
            async with _present(first, second):
                described, modules = await in_store_thread(
                    _compare_blobs, services.store, first.digest, second.digest, shape
                )
        fields = [shown | more for shown, more in zip(fields, described, strict=True)]
    return {
        "object": "adapter.diff",
        "from": objects[0],
        "to": objects[1],
        "changed": changed_fields(*fields),
        "modules": modules,
    }


@router.get("/files")
@described(AdapterFiles, errors=(409,))
async def list_files(name: str, request: Request, caller: Caller) -> dict[str, Any]:
    """Lists the files of a version, `sql@3`, or of the live one, `sql`, as they were uploaded."""
    services: Services = request.app.state.services
    version = await _version(services, caller, *own_ref(name))
    with services.download_slots.taken(caller.tenant_id):
        files = await _files_of(services, version)
    data = [{"name": file, **about} for file, about in sorted(files.about.items())]
    adapter = version_object(version) | {"digest_format": files.digest_format}
    return {"object": "list", "adapter": adapter, "data": data}


@router.get("/files/{file}")
@described(media={"application/octet-stream": None}, errors=(409,))
async def download_file(name: str, file: str, request: Request, caller: Caller) -> StreamingResponse:
    """Sends one file of a version."""
    services: Services = request.app.state.services
    version = await _version(services, caller, *own_ref(name))
    async with holding(services.download_slots.taken(caller.tenant_id)) as held:
        files = (await _files_of(services, version)).about
        if file not in files:
            message = f"{version.ref} has no file {file[:80]!a}. It has {', '.join(sorted(files))}."
            raise ApiError(404, message, type="invalid_request_error", code="file_not_found", param="file")
        headers = {"Content-Length": str(files[file]["bytes"]), "ETag": f'"{files[file]["sha256"]}"'}
        chunks = services.store.chunks(version.digest, file)
        async with _present(version):
            first = await in_store_thread(next, chunks, b"")
        # It waits for what it has begun to fetch, and the slot is free only then.
        held.push_async_callback(in_store_thread, _close, chunks)
        return Download(_pieces(first, chunks), headers=headers, held=held.pop_all())


async def _version(services: Services, caller: Principal, name: str, number: int | None) -> AdapterVersion:
    """One version of the caller's own. Raises as the registry does."""
    ref = ModelRef(name, number, live_only=number is None)
    found = await services.registry.resolve(caller.tenant_id, ref)
    if found is None:
        raise AdapterNotFound(name if number is None else f"{name}@{number}")
    if found.live is None:
        message = f"'{name}' has no live version yet. Name one, as in '{name}@1', or promote one first."
        raise AdapterConflict(message, "no_live_version")
    return found.live


@dataclass(frozen=True, slots=True)
class _Files:
    """A version's files: by name their size and hash, as the manifest has them."""

    about: dict[str, dict[str, Any]]
    digest_format: int = DIGEST_FORMAT


async def _files_of(services: Services, version: AdapterVersion) -> _Files:
    """The files of a version. Raises ApiError 503 when the store fails, or has lost them."""
    async with _present(version):
        return await in_store_thread(_files, services.store, version.digest)


@asynccontextmanager
async def _present(*versions: AdapterVersion) -> AsyncIterator[None]:
    """Answers for what reading their files may end in: ApiError 503, and 400 where one cannot be laid out."""
    try:
        yield
    except InvalidAdapter as error:
        message = f"A version was made for another base model than the one served now: {error.message}"
        raise invalid_request(message, param=error.field_or_tensor, code="invalid_adapter") from error
    except (OSError, BlobNotFound) as error:
        refs = " or ".join(version.ref for version in versions)
        logger.error("the files of %s cannot be read: %s", refs, error)
        message = f"The files of {refs} cannot be read at the moment. Try again later, or tell your operator."
        if isinstance(error, BlobNotFound | CorruptBlob):
            message = f"The files of {refs} cannot be read: they are lost or damaged. Upload them again."
        raise unavailable(message, retry_after_s=60, code="store_unavailable") from error


async def _pieces(first: bytes, others: Generator[bytes, None, None]) -> AsyncIterator[bytes]:
    """The pieces of a file, of which one has been read, up to the end or an empty one."""
    piece = first
    while piece:
        yield piece
        piece = await in_store_thread(next, others, b"")


def _close(pieces: Generator[bytes, None, None]) -> None:
    with suppress(ValueError):  # one is being read in another thread, with which they end
        pieces.close()


def _files(store: BlobStore, digest: bytes) -> _Files:
    """The files that were uploaded."""
    listed = store.manifest(digest).get("files")
    if listed is not None:
        return _Files({name: about for name, about in listed.items() if is_adapter_file(name)})
    # Published before manifests listed files, when there were two, and digests were taken otherwise.
    with store.stage() as staging:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            store.copy_file(digest, name, staging.path / name)
        return _Files(describe_files(staging.path, {}), digest_format=1)


def _compare_blobs(
    store: BlobStore, before: bytes, after: bytes, shape: BaseModelShape
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the layouts say of themselves, and the changes by module."""
    with store.stage() as staging:
        folders = [staging.path / side for side in ("from", "to")]
        layouts = [
            _fetched(store, digest, folder, shape)
            for digest, folder in zip((before, after), folders, strict=True)
        ]
        changes = compare(layouts[0], folders[0], layouts[1], folders[1])
        modules = [
            {"module": item.module, "from": item.before, "to": item.after, "difference": item.difference}
            for item in changes
        ]
        return [describe(layout) for layout in layouts], modules


def _fetched(store: BlobStore, digest: bytes, folder: Path, shape: BaseModelShape) -> AdapterLayout:
    folder.mkdir()
    for name in _files(store, digest).about:
        store.copy_file(digest, name, folder / name)
    return read_layout(folder, shape)
