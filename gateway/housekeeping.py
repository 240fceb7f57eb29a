"""Clears the store of what crashed uploads and deletes have left, for as long as the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import RedisError

from adapters import lifecycle
from adapters.blob_store import BlobStore
from adapters.registry import Registry
from gateway import tasks

logger = logging.getLogger(__name__)

_EVERY_S = 600.0
_RETRY_S = 10.0
_ABANDONED_AFTER_S = 3600


@asynccontextmanager
async def housekeeping(registry: Registry, store: BlobStore) -> AsyncIterator[None]:
    """Tidies the store now and every ten minutes while the block runs. Waits for nothing on entering."""
    task = asyncio.create_task(_keep_tidy(registry, store), name="housekeeping")
    try:
        yield
    finally:
        await tasks.cancel(task)


async def _keep_tidy(registry: Registry, store: BlobStore) -> None:
    while True:
        try:
            await lifecycle.tidy(registry, store, older_than_s=_ABANDONED_AFTER_S)
        except RedisError:
            await asyncio.sleep(_RETRY_S)  # who needs Redis says that it is away
        except OSError as error:
            logger.warning("the store cannot be tidied: %s", error)
            await asyncio.sleep(_EVERY_S)
        else:
            await asyncio.sleep(_EVERY_S)
