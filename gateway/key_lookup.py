"""Finds a key with its tenant: one script, whose calls that meet share a round trip."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from adapters.script_batches import ScriptBatches
from gateway import keys, tenants
from gateway.keys import KeyRecord
from gateway.tenants import Tenant

# ARGV[1]: a tenant's key in Redis, but for its id.
_LOOK_UP = """
local key = redis.call('HGETALL', KEYS[1])
if #key == 0 then return {} end
local tenant = redis.call('HGET', KEYS[1], 'tenant')
return {key, tenant, redis.call('HGETALL', ARGV[1] .. tenant)}
"""


class KeyLookup:
    """See the module. One object is for one event loop."""

    def __init__(self, redis: Redis) -> None:
        self._batches = ScriptBatches(redis, redis.register_script(_LOOK_UP))

    async def __call__(self, key_id: str) -> tuple[KeyRecord, Tenant | None] | None:
        """Returns the record of a key, expired ones too, and its tenant if it has one; None: no such key.

        Raises redis' own errors when Redis is away.
        """
        found = await self._batches([keys.document_key(key_id)], [tenants.tenant_key("")])
        if not found:
            return None
        key, tenant_id, tenant = found
        document = _document(tenant)
        owner = tenants.from_document(tenants.text(tenant_id), document) if document else None
        return keys.from_document(key_id, _document(key)), owner


def _document(flat: Sequence[bytes | str]) -> dict[str, str]:
    """A hash as HGETALL has it inside a script."""
    values = [tenants.text(value) for value in flat]
    return dict(zip(values[::2], values[1::2], strict=True))
