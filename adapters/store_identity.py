"""Whether the store is the one that belongs to this Redis.

A store whose volume is not mounted looks like one that is new and empty. A gateway that went on with it would
take files of adapters and of batches for lost, and put uploads below the mount point. So the two have one
random id: the store in a record, Redis under a key. The first gateway of both makes it.
"""

from __future__ import annotations

import asyncio
import secrets

from redis.asyncio import Redis

from adapters.blob_store import BlobStore
from adapters.registry.scripts import text
from adapters.store_threads import in_store_thread

STORE_KEY = "loraplex:store"
_RECORD = "store"
_TRIES = 20
_PAUSE_S = 0.1
"""As long another gateway, which is the first as well, may take from the key to the record."""


class WrongStore(Exception):
    """The store is not the one that Redis knows. The message is for the operator."""


async def check_identity(redis: Redis, store: BlobStore, location: str) -> None:
    """Compares the store's id with that of Redis; where one of them has none, it gets the other's.

    Raises WrongStore where both differ, or where Redis has one and the store has none; RedisError and OSError
    where one of them cannot be reached.
    """
    own: str | None = None
    for _ in range(_TRIES):
        own = await _own_id(store)
        is_first = await redis.set(STORE_KEY, own or secrets.token_hex(16), nx=True)
        if is_first and own is None:
            await _mark(redis, store)
        elif own is not None:
            break
        else:
            await asyncio.sleep(_PAUSE_S)
    if own is not None and own == await _known_id(redis):
        return
    raise _wrong(location, "is new, or empty" if own is None else "belongs to another")


async def confirm_identity(redis: Redis, store: BlobStore, location: str) -> None:
    """Compares the two ids, and makes none. Raises WrongStore where the store has none, or another than
    Redis; RedisError and OSError where one of them cannot be reached.
    """
    own, known = await _own_id(store), await _known_id(redis)
    if own is None:
        raise WrongStore(
            f"No gateway has used the store '{location}' yet: it has no id. Is its volume mounted, and is "
            "--store that of the gateways?"
        )
    if known and known != own:
        raise _wrong(location, "belongs to another")


def _wrong(location: str, why: str) -> WrongStore:
    return WrongStore(
        f"The store '{location}' does not belong to this Redis: it {why}. Is its volume mounted, and are "
        "--store and --redis-url those of one deployment? To use it all the same, delete the key "
        f"{STORE_KEY} in Redis."
    )


async def _own_id(store: BlobStore) -> str | None:
    try:
        record = await in_store_thread(store.read_record, _RECORD)
    except ValueError:
        record = {}  # damaged: so it has no id that Redis could know
    return None if record is None else str(record.get("id"))


async def _known_id(redis: Redis) -> str:
    return text(await redis.get(STORE_KEY) or "")


async def _mark(redis: Redis, store: BlobStore) -> None:
    try:
        await in_store_thread(store.put_record, _RECORD, {"id": await _known_id(redis)})
    except OSError:
        await redis.delete(STORE_KEY)
        raise
