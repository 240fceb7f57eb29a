"""From what the client names to what engines know, inside the key's tenant: nothing a client sends can leave
it, but for what another tenant has granted to this one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from redis.exceptions import RedisError

from adapters.identity import InvalidName
from adapters.model_ref import parse_model_ref
from adapters.registry import AdapterVersion, Resolution
from gateway.auth import Principal
from gateway.engine_client import EngineFleet
from gateway.errors import ApiError, unavailable
from gateway.known_adapters import KnownAdapters
from gateway.tenants import PrefixSharing
from protos.engine_pb2 import ModelInfo


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What a `model` string means for one request."""

    served_name: str
    """What the response says: the base model's name, `name@version`, or `owner/name@version`."""
    info: ModelInfo
    """The base model."""
    adapter: AdapterVersion | None = None
    """None: the base model itself."""

    @property
    def adapter_digest(self) -> bytes:
        """What engines know the adapter by; empty for the base model."""
        return self.adapter.digest if self.adapter else b""

    @property
    def adapter_name(self) -> str:
        """The name without version, as the caller says it: `sql`, `owner/sql`. Empty for the base model."""
        return self.served_name.rpartition("@")[0] if self.adapter else ""

    @property
    def vocab_size(self) -> int:
        """Tokens that exist: more than the base model's where the adapter adds some."""
        return max(self.info.vocab_size, self.adapter.vocab_size if self.adapter else 0)


class ModelResolver:
    """Resolves `model` strings, to a base model that an engine has or to one of the caller's adapters."""

    def __init__(self, adapters: KnownAdapters, engines: EngineFleet) -> None:
        self._adapters = adapters
        self._engines = engines

    async def resolve(self, name: str, caller: Principal, *, user: str | None = None) -> ResolvedModel:
        """Returns what `name` means for a request of the caller; while a canary runs, for its `user`.

        Raises ApiError: 404, the same for an adapter of somebody else as for none, and for a base model that
        the tenant may not use as for none; 403 for an adapter that the tenant has above such a base; 503
        while no engine has shown its model, or while an adapter not seen before cannot be looked up.
        """
        base = self._engines.model_info(name)
        if base is not None:
            if not may_use(caller, base):
                raise model_not_found(name)
            return ResolvedModel(base.name, base)
        base = self._engines.model_info()
        if base is None:
            raise unavailable("No engine is ready. Try again shortly.")
        found = await self.find_adapter(name, caller)
        if found is None:
            raise model_not_found(name)
        check_base(name, caller, base)
        version = found.choose(caller.tenant_id, user)
        if version is None:
            raise nothing_is_live(name)
        return ResolvedModel(version.ref_for(caller.tenant_id), base, version)

    def announce(self, model: ResolvedModel) -> None:
        """Has an engine begin to read the adapter of a request that is about to come.

        An activated adapter's requests go where their prompts do, which is not known yet.
        """
        if model.adapter is not None and not model.adapter.invocation_tokens:
            self._engines.announce(model.adapter.digest, model.info.digest)

    async def find_adapter(self, name: str, caller: Principal) -> Resolution | None:
        """Returns what the name means to the caller, or None for nothing.
        Raises ApiError 503 when it cannot be looked up.
        """
        try:
            ref = parse_model_ref(name)
        except InvalidName:
            return None
        try:
            return await self._adapters.resolve(caller.tenant_id, ref)
        except (RedisError, OSError, TimeoutError) as error:
            message = "Adapters cannot be looked up at the moment. Try again shortly."
            raise unavailable(message, code="registry_unavailable") from error


def may_use(caller: Principal, base: ModelInfo) -> bool:
    """Whether the caller's tenant may use this base model."""
    return caller.base_models is None or base.name in caller.base_models


def check_base(name: str, caller: Principal, base: ModelInfo) -> None:
    """Raises ApiError 403 for an adapter of the caller's that runs on a base model which it may not use."""
    if not may_use(caller, base):
        raise base_not_allowed(f"The adapter '{name}' runs on a base model that this tenant may not use.")


def base_not_allowed(fault: str) -> ApiError:
    """Returns the 403 for a base model that the operator keeps from the tenant; it does not name it."""
    message = f"{fault} Ask your operator."
    return ApiError(403, message, type="permission_error", code="base_model_not_allowed", param="model")


def model_not_found(name: str) -> ApiError:
    """Returns the 404 for a model that the tenant does not have."""
    return _not_found(f"The model '{name}' does not exist or you do not have access to it.")


def nothing_is_live(name: str) -> ApiError:
    """Returns the 404 for an adapter of which nothing was promoted yet."""
    return _not_found(
        f"The adapter '{name}' has no live version yet. Promote one, or name a version, as in '{name}@1'."
    )


def cache_scope(caller: Principal, salt: str | None) -> bytes:
    """Returns who may share KV blocks with this request: the tenant, or all tenants that chose to share.

    A client's salt is mixed in, so it can only narrow the scope.
    """
    scope = _scope_of(caller.tenant_id, caller.prefix_sharing)
    return hashlib.sha256(scope + salt.encode()).digest() if salt is not None else scope


@lru_cache(maxsize=1024)
def _scope_of(tenant_id: str, sharing: PrefixSharing) -> bytes:
    shared = sharing == PrefixSharing.SHARED
    return hashlib.sha256(b"shared" if shared else b"tenant\0" + tenant_id.encode()).digest()


def _not_found(message: str) -> ApiError:
    return ApiError(404, message, type="invalid_request_error", param="model", code="model_not_found")
