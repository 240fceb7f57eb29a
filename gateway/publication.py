"""What every upload ends with, however its files have arrived: they are judged, and become a version."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio.to_thread

from adapters import lifecycle
from adapters.adapter_files import is_weights
from adapters.base_model import BaseModelShape
from adapters.blob_store import BlobStore, Staging, is_intact
from adapters.identity import InvalidName, check_name
from adapters.registry import AdapterNotFound, AdapterVersion, Quota
from adapters.safetensors_header import MAX_HEADER_BYTES
from adapters.store_threads import in_store_thread
from adapters.validation import AdapterSummary, InvalidAdapter, largest_weights_file, validate
from gateway.adapter_removal import delete_adapter
from gateway.auth import Principal
from gateway.base_shape import shape_of
from gateway.errors import ApiError, invalid_request, store_unavailable, unavailable
from gateway.known_uploads import KnownUploads
from gateway.own_tokenizers import check_own_tokenizer
from gateway.resolve import base_not_allowed, may_use
from gateway.services import Services
from gateway.upload_sessions import ExpectedFile, UploadOptions
from protos.engine_pb2 import ModelInfo


def model_for_uploads(services: Services, caller: Principal) -> ModelInfo:
    """The base model that the caller's uploads are checked against.

    Raises ApiError: 503 while no engine has shown it, 403 where the tenant may not use it.
    """
    info = services.engines.model_info()
    if info is None:
        raise unavailable("No engine has shown its model yet, so no adapter can be checked against it.")
    if not may_use(caller, info):
        raise base_not_allowed("This tenant may not use the base model that is served here.")
    return info


def quota_of(caller: Principal) -> Quota:
    """How many adapters the caller's tenant may have, how many bytes, and how many pinned pages."""
    limits = caller.limits
    return Quota(limits.adapters, limits.adapter_bytes, limits.pinned_pages)


async def check_room(services: Services, caller: Principal, name: str, files: Sequence[ExpectedFile]) -> None:
    """Raises AdapterConflict where these files can never fit into the tenant's quota, before they are sent.

    Whether they do is seen when they are published: what a header takes of a file is not known yet.
    """
    weights = [file.bytes for file in files if is_weights(file.name)]
    least = max(0, sum(weights) - len(weights) * MAX_HEADER_BYTES)
    await services.registry.check_room(caller.tenant_id, name, least, quota_of(caller))


def check_upload_name(services: Services, name: str) -> str:
    """Returns a name that an upload may have. Raises ApiError 400."""
    try:
        check_name(name)
    except InvalidName as error:
        raise invalid_request(str(error), param="name", code="invalid_name") from None
    if services.engines.model_info(name) is not None:
        message = f"'{name}' is the base model's name. Choose another."
        raise invalid_request(message, param="name", code="invalid_name")
    return name


def largest_upload(services: Services, info: ModelInfo) -> int:
    """The bytes that an upload's weights may have."""
    return min(services.settings.max_adapter_bytes, largest_weights_file(shape_of(info)))


async def publish_folder(
    services: Services, staging: Staging, info: ModelInfo, *, caller: Principal, options: UploadOptions
) -> AdapterVersion:
    """Checks the adapter in `staging`, whose files have all been hashed, and makes it a version.

    Raises ApiError 4xx that names the fault; AdapterConflict when the tenant has no room for it; OSError when
    the store fails. Whoever staged the files removes
    what is left of them.
    """
    offered = dict(staging.hashes)
    async with _writing_back(staging.path):
        tokenizer = await services.own_tokenizers.take(staging.path, info.digest)
        summary = await _validate(staging.path, shape_of(info), options, tokenizer)
        await check_own_tokenizer(staging.path, max(info.vocab_size, summary.vocab_size))
    version = await lifecycle.publish(
        services.registry,
        services.store,
        staging,
        tenant=caller.tenant_id,
        name=options.name,
        summary=summary,
        promote=options.promote,
        by=caller.key_id,
        quota=quota_of(caller),
    )
    await _check_tenant(services, version)
    known = KnownUploads(services.redis, info.digest)
    await known.remember(caller.tenant_id, offered, summary, allow_zero=options.allow_zero)
    return version


async def publish_known(
    services: Services, info: ModelInfo, hashes: dict[str, str], *, caller: Principal, options: UploadOptions
) -> AdapterVersion | None:
    """Makes files that this tenant has uploaded before, and still has a version of, another version.

    None: the files have to be sent, as they have where the store has lost or damaged them. What other tenants
    have makes no difference, nor does it take longer. Raises ApiError 429 where the tenant has no upload slot
    left, since all files are read.
    """
    known = KnownUploads(services.redis, info.digest)
    summary = await known.find(caller.tenant_id, hashes, allow_zero=options.allow_zero)
    if summary is None:
        return None
    async with services.registry.references.reserved(summary.digest):
        if not await services.registry.tenant_refers(caller.tenant_id, summary.digest):
            return None
        with services.upload_slots.taken(caller.tenant_id):
            async with store_faults():
                if not await in_store_thread(is_intact, services.store, summary.digest):
                    return None
        await lifecycle.recall(services.registry, services.store, caller.tenant_id, options.name)
        version = await services.registry.add_version(
            caller.tenant_id,
            options.name,
            summary,
            promote=options.promote,
            by=caller.key_id,
            quota=quota_of(caller),
        )
    await lifecycle.record(services.registry, services.store, caller.tenant_id, options.name)
    await _check_tenant(services, version)
    return version


@asynccontextmanager
async def staged(store: BlobStore) -> AsyncIterator[Staging]:
    """A staging folder, made and removed off the event loop: to unlink gigabytes takes a while.

    Raises ApiError 503 when the store fails meanwhile.
    """
    async with store_faults():
        staging = await in_store_thread(store.stage)
        try:
            yield staging
        finally:
            await in_store_thread(staging.discard)


@asynccontextmanager
async def store_faults() -> AsyncIterator[None]:
    """Answers 503 where the store fails."""
    try:
        yield
    except OSError as error:
        raise store_unavailable(error) from error


@asynccontextmanager
async def _writing_back(folder: Path) -> AsyncIterator[None]:
    """Has the files reach the disk while they are checked, which keeps only the processor busy.

    Raises OSError when they cannot.
    """
    writing = asyncio.create_task(anyio.to_thread.run_sync(_write_back, list(folder.iterdir())))
    try:
        yield
    finally:
        await asyncio.wait([writing])
        fault = writing.exception()
    if fault is not None:
        raise fault


def _write_back(files: list[Path]) -> None:
    for file in files:
        with suppress(FileNotFoundError), file.open("rb") as opened:  # a tokenizer's may be removed meanwhile
            os.fsync(opened.fileno())


async def _validate(
    folder: Path, shape: BaseModelShape, options: UploadOptions, tokenizer: str
) -> AdapterSummary:
    # In anyio's threads, not asyncio's own, where prompts are tokenised: uploads must not hold those up.
    try:
        return await anyio.to_thread.run_sync(
            lambda: validate(folder, shape, allow_zero=options.allow_zero, tokenizer=tokenizer)
        )
    except InvalidAdapter as error:
        raise invalid_request(error.message, param=error.field_or_tensor, code="invalid_adapter") from None


async def _check_tenant(services: Services, version: AdapterVersion) -> None:
    """A tenant that was deleted during the upload: who deleted it did not see this adapter."""
    if await services.tenants.get(version.tenant) is None:
        with suppress(AdapterNotFound):
            await delete_adapter(services, version.tenant, version.name)
        raise ApiError(403, "This tenant has been deleted.", type="permission_error", code="tenant_deleted")
