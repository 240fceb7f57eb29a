"""What the operator's routes answer, as the OpenAPI description has it. See gateway.schemas.answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.schemas.answers import Created

TenantId = Annotated[str, Field(examples=["acme"])]
KeyId = Annotated[str, Field(examples=["0f3a9c1d2e4b"])]
Scope = Literal["inference", "adapters", "admin"]


class Tenant(TypedDict):
    """A customer."""

    id: TenantId
    object: Literal["tenant"]
    name: Annotated[str, Field(examples=["Acme Ltd"])]
    weight: Annotated[float, Field(description="Its share of an engine while several have work waiting.")]
    prefix_sharing: Literal["private", "shared"]
    max_pinned_adapters: int
    suspended: bool
    created: Created


class TenantList(TypedDict):
    """All tenants, oldest first."""

    object: Literal["list"]
    data: list[Tenant]


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
