"""Keeps the store in step with the registry: what is registered has its blob, and each name its record.

Publishing reserves the digest, so that no collector takes the blob between its arrival and the version that
refers to it. Deleting only drops references; `adapters.collector` removes what nobody has referred to for a
while.

After each change the name's record is written to the store. Redis notes which records are out of date, in the
change's own script, so what a crash or a full disk leaves unwritten is written later (`write_records`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from adapters.blob_store import BlobStore, Staging, StoreUnavailable
from adapters.registry import AdapterVersion, Quota, Registry
from adapters.registry.quotas import NO_QUOTA
from adapters.store_threads import in_store_thread
from adapters.validation import AdapterSummary

logger = logging.getLogger(__name__)


async def publish(
    registry: Registry,
    store: BlobStore,
    staging: Staging,
    *,
    tenant: str,
    name: str,
    summary: AdapterSummary,
    promote: bool = True,
    by: str = "",
    quota: Quota = NO_QUOTA,
) -> AdapterVersion:
    """Makes validated files in `staging` a new version of the tenant's name, inside the staging's context.

    The version is live from then on, unless `promote` is False. `by` is the id of the key that uploads.
    Raises as the registry does: then the blob stays for its grace.
    """
    manifest = {
        "digest": summary.digest.hex(),
        "rank": summary.rank,
        "nbytes": summary.nbytes,
        "num_tensors": summary.num_tensors,
        "target_modules": summary.target_modules,
        "base_model": summary.base_model,
    }
    async with registry.references.reserved(summary.digest):
        await in_store_thread(staging.publish, summary.digest, manifest)
        await recall(registry, store, tenant, name)
        version = await registry.add_version(tenant, name, summary, promote=promote, by=by, quota=quota)
    await record(registry, store, tenant, name)
    return version


async def delete(
    registry: Registry, store: BlobStore, *, tenant: str, name: str, version: int | None = None, by: str = ""
) -> Sequence[bytes]:
    """Deletes a name with its versions, or one version of it. Raises as the registry does.

    Returns the digests that no version of any tenant has any more. Their blobs stay for the grace.
    """
    if version is None:
        unused = await registry.delete(tenant, name)
    else:
        unused = await registry.delete_version(tenant, name, version, by=by)
    await record(registry, store, tenant, name)
    return unused


async def rename(
    registry: Registry, store: BlobStore, *, tenant: str, name: str, target: str, by: str = ""
) -> None:
    """Gives a name's versions another name. Raises as the registry does, and OSError when the store fails."""
    await recall(registry, store, tenant, target)
    await registry.rename(tenant, name, target, by=by)
    await record(registry, store, tenant, target)
    await record(registry, store, tenant, name)


async def recall(registry: Registry, store: BlobStore, tenant: str, name: str) -> None:
    """Brings a name that comes up for the first time back from its record, if it has one: then Redis has lost
    it, and what is written next must neither give its numbers again nor take the record's place.

    Raises OSError when the store fails, or has a record that cannot be read.
    """
    if await registry.records.knows(tenant, name):
        return
    path = record_path(tenant, name)
    try:
        found = await in_store_thread(store.read_record, path)
        if found is not None:
            await registry.records.restore(found)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreUnavailable(f"the record {path} cannot be read: {error}") from error


async def forget_tenant(registry: Registry, store: BlobStore, tenant: str) -> None:
    """Removes all that the registry and the records know of a tenant, and what others granted it. Raises
    OSError when the store fails: called again, it removes the rest.
    """
    await registry.forget_tenant(tenant)
    for path in await in_store_thread(_recorded_of, store, tenant):
        await in_store_thread(store.delete_record, path)
    await write_records(registry, store)  # of the names that were granted


async def record(registry: Registry, store: BlobStore, tenant: str, name: str) -> None:
    """Writes the record of a name that was changed. A store that fails is logged: it is tried again later."""
    try:
        await _write_record(registry, store, tenant, name)
    except OSError as error:
        logger.error("the record of %s of tenant %s is not written yet: %s", name, tenant, error)


async def write_records(registry: Registry, store: BlobStore) -> None:
    """Writes every record that is out of date. Raises OSError when the store fails."""
    for tenant, name in await registry.records.outdated():
        await _write_record(registry, store, tenant, name)


def record_path(tenant: str, name: str) -> str:
    """Where the store keeps the record of a name."""
    return f"names/{tenant}/{name}"


def _recorded_of(store: BlobStore, tenant: str) -> list[str]:
    return [path for path, _ in store.list_records(f"names/{tenant}")]


async def _write_record(registry: Registry, store: BlobStore, tenant: str, name: str) -> None:
    # Writers may overtake each other, so each looks again: the last to write sees that its record is current.
    is_current = False
    while not is_current:
        document = await registry.records.export(tenant, name)
        await in_store_thread(store.put_record, record_path(tenant, name), document)
        is_current = await registry.records.recorded(tenant, name, document["revision"])
