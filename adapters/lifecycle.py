"""Publishes and deletes adapters so that the registry never names a blob that the store does not hold.

Blobs are shared by digest between names and tenants, so an upload may race the
delete that would remove its blob. Publishing goes: blob, registry, blob again if a
delete took it in between. Deleting goes: registry, blob into the trash, and back out
of it if an upload referred to it in between. Whichever comes second sees the other.
"""

from __future__ import annotations

import asyncio

from adapters.blob_store import BlobStore, Staging, Trashed
from adapters.registry import AdapterVersion, Registry
from adapters.validation import AdapterSummary


async def publish(
    registry: Registry, store: BlobStore, staging: Staging, *, tenant: str, name: str, summary: AdapterSummary
) -> AdapterVersion:
    """Makes validated files in `staging` the tenant's new live version. Call inside the staging's context."""
    manifest = {
        "digest": summary.digest.hex(),
        "rank": summary.rank,
        "nbytes": summary.nbytes,
        "num_tensors": summary.num_tensors,
        "target_modules": summary.target_modules,
        "base_model": summary.base_model,
    }
    await asyncio.to_thread(staging.publish, summary.digest, manifest)
    version = await registry.add_version(tenant, name, summary)
    if not await asyncio.to_thread(store.contains, summary.digest):
        await asyncio.to_thread(staging.publish, summary.digest, manifest)
    return version


async def delete(registry: Registry, store: BlobStore, *, tenant: str, name: str) -> bool:
    """Deletes a name, its versions and each blob that nothing refers to now. False: there is no such name."""
    unreferenced = await registry.delete(tenant, name)
    for digest in unreferenced or ():
        trashed = await asyncio.to_thread(store.withdraw, digest)
        if trashed is not None:
            await _settle(registry, trashed)
    return unreferenced is not None


async def tidy(registry: Registry, store: BlobStore, *, older_than_s: float) -> None:
    """Clears what crashed uploads, untouched for `older_than_s` seconds, and crashed deletes have left."""
    await asyncio.to_thread(store.clean, older_than_s)
    for trashed in await asyncio.to_thread(store.trashed):
        await _settle(registry, trashed)


async def _settle(registry: Registry, trashed: Trashed) -> None:
    """Back into the store with a withdrawn blob that something refers to; away with any other."""
    if await registry.is_referenced(trashed.digest):
        await asyncio.to_thread(trashed.restore)
    await asyncio.to_thread(trashed.purge)
