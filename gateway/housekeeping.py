"""Clears the store of what crashes left and nobody needs any more, for as long as the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from redis.exceptions import RedisError

from adapters.blob_store import BlobStore
from adapters.collector import note_orphans, tidy
from adapters.registry import Registry
from adapters.store_threads import in_store_thread
from gateway import tasks
from gateway.upload_sessions import UploadSessions

logger = logging.getLogger(__name__)

_EVERY_S = 600.0
_ORPHANS_EVERY = 36  # rounds: they are looked for in the whole store
_RETRY_S = 10.0
_ABANDONED_AFTER_S = 3600


@asynccontextmanager
async def housekeeping(
    registry: Registry, store: BlobStore, sessions: UploadSessions, *, grace_s: int
) -> AsyncIterator[None]:
    """Tidies the store now and every ten minutes while the block runs. Waits for nothing on entering.

    `grace_s` is how long a blob stays after the last reference to it is gone.
    """
    task = tasks.start(_keep_tidy(registry, store, sessions, grace_s), "housekeeping")
    try:
        yield
    finally:
        await tasks.cancel(task)


async def _keep_tidy(registry: Registry, store: BlobStore, sessions: UploadSessions, grace_s: int) -> None:
    for number in count():
        pause = _EVERY_S
        try:
            await in_store_thread(sessions.clean)
            await tidy(registry, store, abandoned_after_s=_ABANDONED_AFTER_S, grace_s=grace_s)
            if number % _ORPHANS_EVERY == 0:
                await note_orphans(registry, store)
        except RedisError:
            pause = _RETRY_S  # who needs Redis says that it is away
        except OSError as error:
            logger.warning("the store cannot be tidied: %s", error)
        except Exception:  # a record that somebody has broken, say: that must not fill the disk
            logger.exception("the store could not be tidied to its end; it is tried again")
        await asyncio.sleep(pause)
