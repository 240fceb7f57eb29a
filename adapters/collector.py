"""Removes from the store what nobody needs any more: blobs that no name has referred to for a while, and what
crashed uploads and collectors have left.

Any number of collectors may run: `References.condemn` gives a digest to one of them, and not while an upload
relies on it. A blob that Redis knows nothing of was put there by an upload that crashed before it registered
its version, or is of a Redis that was lost: so what a record in the store names is never taken for an orphan.
"""

from __future__ import annotations

import logging
from itertools import islice

from adapters import lifecycle
from adapters.blob_store import BlobStore, StoreUnavailable, Trashed
from adapters.registry import Registry
from adapters.registry.records import digests_of
from adapters.store_threads import in_store_thread

logger = logging.getLogger(__name__)

_BATCH = 1000


async def collect(registry: Registry, store: BlobStore, *, grace_s: int) -> int:
    """Removes the blobs that nobody has referred to for `grace_s` seconds. Returns how many.

    Raises OSError when the store fails: then the blob at hand stays condemned for a while, since a bucket
    may yet do what it did not answer.
    """
    collected = 0
    for digest in await registry.references.unreferenced(grace_s):
        if not await registry.references.condemn(digest, grace_s):
            continue
        trashed = await in_store_thread(store.withdraw, digest)
        if trashed is not None:
            if not await _empty(registry, trashed):
                continue  # noted as before, in case an upload needs it that ends without a version
            collected += 1
        await registry.references.absolve(digest)
    return collected


async def note_orphans(registry: Registry, store: BlobStore) -> int:
    """Begins the grace of blobs that neither Redis nor a record in the store knows. Returns how many."""
    digests = await in_store_thread(lambda: iter(list(store.digests())))
    unknown: set[bytes] = set()
    while batch := list(islice(digests, _BATCH)):
        unknown |= set(await registry.references.unknown(batch))
    if unknown:
        unknown -= await in_store_thread(_recorded, store)
        await registry.references.note_orphans(unknown)
    return len(unknown)


async def tidy(registry: Registry, store: BlobStore, *, abandoned_after_s: int, grace_s: int) -> None:
    """Clears what crashed uploads and collectors have left, and collects; writes the records that are out of
    date. Uploads are abandoned when nobody has touched them for `abandoned_after_s` seconds. What cannot be
    removed from the trash is logged, and keeps nothing else in the store.
    """
    await in_store_thread(store.clean, abandoned_after_s)
    for trashed in await in_store_thread(store.trashed):
        try:
            await _empty(registry, trashed)
        except StoreUnavailable:
            raise  # it would not answer for the next one, either
        except OSError as error:
            logger.warning("blob %s stays in the trash: %s", trashed.digest.hex()[:12], error)
    await collect(registry, store, grace_s=grace_s)
    await lifecycle.write_records(registry, store)


async def _empty(registry: Registry, trashed: Trashed) -> bool:
    """Purges what is in the trash. False: somebody needs it, and it is back; whoever withdrew it was stopped
    for longer than its condemnation holds, or died.
    """
    is_needed = await registry.references.is_needed(trashed.digest)
    if is_needed:
        await in_store_thread(trashed.restore)
    await in_store_thread(trashed.purge)
    return not is_needed


def _recorded(store: BlobStore) -> set[bytes]:
    """The digests that records name. Raises KeyError for a damaged one, which may name any."""
    return {digest for _, record in store.list_records("names") for digest in digests_of(record)}
