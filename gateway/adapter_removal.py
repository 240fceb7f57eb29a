"""Deletes adapters from the registry, the records and the engines; blobs are for the collector."""

from __future__ import annotations

import asyncio

from adapters import lifecycle
from gateway.services import Services


async def delete_adapter(
    services: Services, tenant_id: str, name: str, version: int | None = None, *, by: str = ""
) -> None:
    """Deletes a tenant's adapter with its versions, or one version. Raises as the registry does.

    Requests under way finish. An engine that cannot be told keeps its copy until it needs the room; nothing
    refers to it any more.
    """
    unused = await lifecycle.delete(
        services.registry, services.store, tenant=tenant_id, name=name, version=version, by=by
    )
    await asyncio.gather(*(services.engines.unload(digest) for digest in unused))
