"""Which sets of files a tenant has uploaded before, so that it need not send them again.

    loraplex:{adapters}:uploaded:<tenant>:<identity>    STRING  what was found out of the files (JSON)

The identity is a hash over the files' names and hashes, the base model that they were checked against, and
what the check allowed. An entry is the tenant's own, and was written from bytes that this server has hashed:
nobody learns from it what others have, and nobody can put words into it. It counts only while the tenant
still has a version of the adapter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from redis.asyncio import Redis

from adapters.validation import AdapterSummary

_KEY = "loraplex:{adapters}:uploaded"
_KEPT_S = 180 * 24 * 3600
"""An entry that is gone costs a transfer, nothing else."""


class KnownUploads:
    """What tenants have uploaded for one base model."""

    def __init__(self, redis: Redis, model_digest: bytes) -> None:
        self._redis = redis
        self._model = model_digest.hex()

    async def remember(
        self, tenant: str, hashes: Mapping[str, str], summary: AdapterSummary, *, allow_zero: bool
    ) -> None:
        """Notes that files with these hashes, by name, are this adapter."""
        values = {**dataclasses.asdict(summary), "digest": summary.digest.hex()}
        await self._redis.set(self._key(tenant, hashes, allow_zero), json.dumps(values), ex=_KEPT_S)

    async def find(
        self, tenant: str, hashes: Mapping[str, str], *, allow_zero: bool
    ) -> AdapterSummary | None:
        """What the tenant's files with these hashes are, or None if it has not uploaded them."""
        found = await self._redis.get(self._key(tenant, hashes, allow_zero))
        if found is None:
            return None
        values = json.loads(found)
        try:
            return AdapterSummary(
                **{
                    **values,
                    "digest": bytes.fromhex(values["digest"]),
                    "target_modules": tuple(values["target_modules"]),
                    "invocation_tokens": tuple(values["invocation_tokens"]),
                }
            )
        except (KeyError, TypeError):  # of another release of this program
            return None

    def _key(self, tenant: str, hashes: Mapping[str, str], allow_zero: bool) -> str:
        parts = [self._model, allow_zero, sorted(hashes.items())]
        return f"{_KEY}:{tenant}:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"
