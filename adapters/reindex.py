"""Rebuilds what Redis knows of adapters from the records that the store keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from adapters.blob_store import BlobStore
from adapters.registry import Registry
from adapters.registry.records import digests_of
from adapters.store_threads import in_store_thread


@dataclass(slots=True)
class Reindexed:
    """What became of the records."""

    restored: int = 0
    current: int = 0
    """Names that Redis has at the same or a later state: they were left alone."""
    faults: list[str] = field(default_factory=list)
    """A sentence for each record that could not be read, and for each blob that is missing."""


async def reindex(registry: Registry, store: BlobStore) -> Reindexed:
    """Brings back every name that a record has and Redis has not: versions, what is live, canaries, grants,
    pins, history and counters. What Redis has is never overwritten, so it is safe at any time and again.

    Raises OSError when the store fails, RedisError when Redis does; what has been restored by then stays.
    """
    result = Reindexed()
    for path, record in await in_store_thread(lambda: list(store.list_records("names"))):
        if not record:
            result.faults.append(f"The record {path} cannot be read: it is damaged.")
            continue
        try:
            digests = digests_of(record)
            restored = await registry.records.restore(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            result.faults.append(f"The record {path} cannot be read: {error}.")
            continue
        result.restored += restored
        result.current += not restored
        for digest in digests:
            if not await in_store_thread(store.contains, digest):
                result.faults.append(f"The store has no files of {path}, digest {digest.hex()}.")
    return result
