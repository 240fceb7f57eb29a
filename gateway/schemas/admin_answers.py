"""What the routes below `/admin` answer, as the OpenAPI description has it. See gateway.schemas.answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.schemas.answers import Created

TenantId = Annotated[str, Field(examples=["acme"])]
KeyId = Annotated[str, Field(examples=["0f3a9c1d2e4b"])]
Scope = Literal["inference", "adapters", "admin"]


class Rates(TypedDict):
    """Limits on traffic; null: none."""

    requests_per_minute: int | None
    input_tokens_per_minute: int | None
    output_tokens_per_minute: int | None
    concurrent_requests: int | None


class Limits(Rates):
    """A tenant's limits; null: none."""

    tokens_per_month: int | None
    adapters: int | None
    adapter_bytes: int | None
    pinned_pages: int | None
    file_bytes: int | None


class Tenant(TypedDict):
    """A customer."""

    id: TenantId
    object: Literal["tenant"]
    name: Annotated[str, Field(examples=["Acme Ltd"])]
    weight: Annotated[float, Field(description="Its share of an engine while several have work waiting.")]
    prefix_sharing: Literal["private", "shared"]
    max_pinned_adapters: int
    suspended: bool
    limits: Limits
    adapter_limits: Annotated[dict[str, Rates], Field(description="By the names that the tenant uses.")]
    base_models: Annotated[list[str] | None, Field(description="Which it may use; null: all.")]
    created: Created


class TenantList(TypedDict):
    """All tenants, oldest first."""

    object: Literal["list"]
    data: list[Tenant]


class DoomedAdapter(TypedDict):
    """An adapter that goes with its tenant, and whom else that concerns."""

    name: Annotated[str, Field(examples=["sql"])]
    versions: list[int]
    live: Annotated[int | None, Field(description="The version that is live.")]
    pinned: bool
    grants: Annotated[list[TenantId], Field(description="The tenants that can no longer use it.")]


class TenantDeletion(TypedDict):
    """What deleting a tenant would take."""

    id: TenantId
    object: Literal["tenant.deletion"]
    deleted: Literal[False]
    keys: list[KeyId]
    adapters: list[DoomedAdapter]
    bytes: Annotated[int, Field(description="What the files of all versions take.")]
    files: Annotated[int, Field(description="How many files it keeps for batches, and of batches.")]
    file_bytes: Annotated[int, Field(description="What these take.")]
    batches: Annotated[list[str], Field(description="Those that have not ended.")]
    granted: Annotated[list[str], Field(description="Adapters of others that it may use until then.")]


class TenantDeleted(TypedDict):
    """A tenant that is gone, and what went with it."""

    id: TenantId
    object: Literal["tenant.deleted"]
    deleted: Literal[True]
    keys: list[str]
    adapters: list[str]


class Key(TypedDict):
    """A key, without its secret."""

    id: KeyId
    object: Literal["key"]
    tenant: TenantId
    scopes: list[Scope]
    created: Created
    expires: Annotated[int | None, Field(description="Unix time; null: never.")]
    expired: bool
    note: str
    limits: Rates


class NewKey(Key):
    """A key with its text, which is shown this once."""

    key: Annotated[str, Field(description="What goes after `Bearer`.")]


class KeyList(TypedDict):
    """A tenant's keys, oldest first."""

    object: Literal["list"]
    data: list[Key]


class KeyDeleted(TypedDict):
    """A key that was revoked."""

    id: KeyId
    object: Literal["key.deleted"]
    deleted: Literal[True]


class AuditObject(TypedDict):
    """Who did what."""

    id: str
    object: Literal["audit.entry"]
    at: Annotated[float, Field(description="Unix time in seconds.")]
    action: Annotated[str, Field(examples=["key.revoke"])]
    tenant: TenantId | None
    target: Annotated[str, Field(description="Id of the tenant or key that changed, or the adapter's name.")]
    key: Annotated[str, Field(description="Id of the key that asked for it.")]
    by: Annotated[str, Field(description="That key's tenant, `operator`, or `gateway` for its own doing.")]
    address: Annotated[str | None, Field(description="The client's; a tenant is not told the operator's.")]
    before: Annotated[dict[str, Any], Field(description="What differs, as it was.")]
    after: Annotated[dict[str, Any], Field(description="What differs, as it is then.")]


class AuditList(TypedDict):
    """Entries of the audit, the latest first."""

    object: Literal["list"]
    data: list[AuditObject]
    next: Annotated[str | None, Field(description="The `cursor` that goes on; null: there are no more.")]
