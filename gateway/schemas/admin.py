"""Bodies of the operator's API. What a field may be is said by its type; what is not known is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gateway.limits import LARGEST_LIMIT
from gateway.tenants import DEFAULT_PINS, MOST_ADAPTER_LIMITS, PrefixSharing

TenantId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
TenantName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
AdapterRef = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9][a-z0-9-]{0,62}/)?[a-z0-9][a-z0-9._-]{0,62}$")
]
BaseNames = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=200)]], Field(max_length=100)
]
Pins = Annotated[int, Field(ge=0, le=10_000)]
Sharing = Annotated[PrefixSharing, Field(strict=False)]
Weight = Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)]
Rate = Annotated[int, Field(ge=1, le=LARGEST_LIMIT)]
Total = Annotated[int, Field(ge=0, le=LARGEST_LIMIT)]
Scope = Literal["adapters", "admin", "inference"]
_TEN_YEARS_S = 10 * 365 * 86_400
_MONTH_S = 31 * 86_400


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    def given(self) -> dict[str, Any]:
        """Returns what the client sent, null included, without what it left out."""
        return self.model_dump(exclude_unset=True)


class RatesBody(_Body):
    """Limits on traffic, each with a window of its own. Null: no limit; absent: as it is."""

    requests_per_minute: Rate | None = None
    input_tokens_per_minute: Rate | None = None
    output_tokens_per_minute: Rate | None = None
    concurrent_requests: Rate | None = None


class LimitsBody(RatesBody):
    """All limits of a tenant. Null: no limit; absent: as it is."""

    tokens_per_month: Annotated[Total | None, Field(description="Input and output together, in UTC.")] = None
    adapters: Annotated[Total | None, Field(description="How many names it may have.")] = None
    adapter_bytes: Annotated[Total | None, Field(description="What its versions' files may take.")] = None
    pinned_pages: Annotated[
        Total | None,
        Field(description="Pages of 16 ranks that its pins may take, by their largest versions."),
    ] = None
    file_bytes: Annotated[Total | None, Field(description="What the files of its batches may take.")] = None


class CreateTenant(_Body):
    """Body of `POST /admin/tenants`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"name": "Acme Ltd", "limits": {"requests_per_minute": 600}}]},
    )

    name: TenantName
    id: TenantId | None = Field(None, description="Without it the name's: `acme-ltd` for 'Acme Ltd'.")
    weight: Weight = 1.0
    prefix_sharing: Sharing = PrefixSharing.PRIVATE
    max_pinned_adapters: Pins = DEFAULT_PINS
    limits: LimitsBody = LimitsBody()
    base_models: BaseNames | None = Field(None, description="Base models that it may use; null: all.")


class UpdateTenant(_Body):
    """Body of `PATCH /admin/tenants/{id}`: what is absent stays, and null unsets a limit."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"weight": 2, "limits": {"requests_per_minute": 600, "tokens_per_month": None}}]
        },
    )

    name: TenantName = ""
    weight: Weight = 1.0
    prefix_sharing: Sharing = PrefixSharing.PRIVATE
    max_pinned_adapters: Pins = DEFAULT_PINS
    suspended: bool = False
    limits: LimitsBody | None = None
    adapter_limits: (
        Annotated[dict[AdapterRef, RatesBody | None], Field(max_length=MOST_ADAPTER_LIMITS)] | None
    ) = None
    base_models: BaseNames | None = None


class CreateKey(_Body):
    """Body of `POST /admin/tenants/{id}/keys`. `expires_in` is in seconds; without it a key never expires."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"scopes": ["inference"], "expires_in": 2592000, "note": "ci"}]},
    )

    scopes: Annotated[list[Scope], Field(min_length=1, max_length=10)] = ["adapters", "inference"]
    expires_in: Annotated[int, Field(gt=0, le=_TEN_YEARS_S)] | None = None
    note: Annotated[str, StringConstraints(max_length=200)] = ""
    limits: RatesBody = RatesBody()


class RotateKey(_Body):
    """Body of `POST /admin/tenants/{id}/keys/{key_id}/rotate`."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"grace": 3600}]})

    grace: Annotated[
        int, Field(ge=0, le=_MONTH_S, description="For how many seconds the old key still works.")
    ] = 0
