"""What engines should hold, as the registry has it: what is pinned, and what nobody has any more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from redis.asyncio import Redis

from adapters.registry.scripts import PINS, REFERENCES, text


@dataclass(frozen=True, slots=True)
class DesiredAdapters:
    """The desired state of an engine's adapters.

    Attributes:
        pinned: the live versions of all names that tenants have pinned.
        gone: of the adapters that the engine holds, those that no version of any tenant has.
    """

    pinned: frozenset[bytes]
    gone: frozenset[bytes]


async def desired_adapters(redis: Redis, held: Collection[bytes]) -> DesiredAdapters:
    """Reads the desired state for an engine that holds these adapters; one round trip.

    A Redis that knows no adapter at all has lost them, and is about to learn of them again: then none is
    gone.
    """
    digests = list(held)
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hvals(PINS)
        pipe.exists(REFERENCES)
        if digests:
            pipe.hmget(REFERENCES, [digest.hex() for digest in digests])
        pins, is_known, *counts = await pipe.execute()
    references = counts[0] if counts else []
    return DesiredAdapters(
        pinned=frozenset(bytes.fromhex(text(digest)) for digest in pins),
        gone=frozenset(
            digest
            for digest, count in zip(digests, references, strict=True)
            if is_known and (count is None or int(count) <= 0)
        ),
    )
