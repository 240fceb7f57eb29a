"""Removes files whose time is over, and what crashes have left in the store."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.asyncio import Redis
from redis.exceptions import RedisError

from adapters.file_store import FileStore
from adapters.store_threads import in_store_thread
from gateway.accounts.windows import root_of
from gateway.batches.files import FileInUse, Files, StoredFile
from gateway.batches.results import batch_of_segment

logger = logging.getLogger(__name__)

_EVERY_S = 60.0
_ORPHANS_EVERY = 360  # rounds: they are looked for in the whole store
_ORPHAN_AFTER_S = 24 * 3600.0
"""A file that nobody knows is one on its way, unless it is older."""
_AT_ONCE = 200


class Upkeep:
    """Any number of gateways may do this at once."""

    def __init__(self, redis: Redis, files: Files, store: FileStore) -> None:
        self._redis = redis
        self._files = files
        self._store = store

    async def run(self) -> None:
        """Tidies up now and then, until cancelled."""
        number = 0
        while True:
            try:
                await self.remove_expired()
                if number % _ORPHANS_EVERY == 0:
                    await self.remove_orphans(_ORPHAN_AFTER_S)
                number += 1
            except RedisError:
                logger.debug("files are not tidied up while Redis is away")
            except OSError as error:
                logger.warning("files cannot be tidied up: %s", error)
            except Exception:  # what one file is wrong about must not keep all others
                logger.exception("files could not all be tidied up; it is tried again")
            await asyncio.sleep(_EVERY_S)

    async def remove_expired(self) -> int:
        """Removes files whose time is over. Returns how many. Those in use go when that ends."""
        removed = in_use = 0
        while expired := await self._files.expired(_AT_ONCE, after=in_use):
            for tenant, file_id in expired:
                try:
                    removed += await remove_file(self._files, self._store, tenant, file_id)
                except FileInUse:
                    in_use += 1
        return removed

    async def remove_orphans(self, older_than_s: float) -> int:
        """Removes what is in the store and nobody knows. Returns how many files."""
        limit = time.time() - older_than_s
        removed = 0
        for name, written in await in_store_thread(lambda: list(self._store.names())):
            if written < limit and not await self._is_known(name):
                await in_store_thread(self._store.delete, name)
                removed += 1
        return removed

    async def _is_known(self, name: str) -> bool:
        tenant, _, file_id = name.partition("/")
        batch_id = batch_of_segment(name)
        if batch_id is None:
            return await self._files.exists(tenant, file_id)
        return bool(await self._redis.exists(f"{root_of(tenant)}:batch:{batch_id}:segments"))


async def remove_file(
    files: Files, store: FileStore, tenant: str, file_id: str, *, even_in_use: bool = False
) -> bool:
    """Removes a file and its bytes. False: there was none. Raises FileInUse, RedisError, OSError."""
    if not await files.remove(tenant, file_id, even_in_use=even_in_use):
        return False
    name = StoredFile(tenant, file_id, "", "", 0, 0, 0).name
    await in_store_thread(store.delete, name)
    return True
