"""Deletes an adapter everywhere: the registry, the store and the engines' memory."""

from __future__ import annotations

import asyncio

from adapters import lifecycle
from gateway.services import Services


async def delete_adapter(services: Services, tenant_id: str, name: str) -> bool:
    """Deletes a tenant's adapter with its versions. Returns False when it has none of this name.

    Requests under way finish. An engine that cannot be told keeps its copy until it needs the room; nothing
    refers to it any more.
    """
    history = await services.registry.show(tenant_id, name)
    deleted = await lifecycle.delete(services.registry, services.store, tenant=tenant_id, name=name)
    if not deleted or history is None:
        return deleted
    digests = {version.digest for version in history.versions}
    unused = [digest for digest in digests if not await services.registry.is_referenced(digest)]
    await asyncio.gather(*(services.engines.unload(digest) for digest in unused))
    return True
