"""What the usage routes answer, as the OpenAPI description has it."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gateway.accounts.entry import Outcome
from gateway.usage import GroupBy

_Count = Annotated[int, Field(ge=0)]
_Cost = Annotated[str, Field(description="In `currency`, in decimal digits, exact.", examples=["12.405"])]
_Currency = Annotated[str, Field(description="As the operator's price list has it.", examples=["EUR"])]
_Time = Annotated[str, Field(examples=["2026-11-29T12:00:00.125Z"])]


class UsageTotal(TypedDict):
    """What all rows add up to."""

    requests: _Count
    errors: Annotated[int, Field(ge=0, description="Requests that failed, timed out, or were not taken.")]
    input_tokens: _Count
    cached_tokens: Annotated[int, Field(ge=0, description="The part of the input that the cache saved.")]
    output_tokens: _Count
    cost: NotRequired[_Cost]
    currency: NotRequired[_Currency]


class UsageGroup(UsageTotal):
    """One row: what it is grouped by, and its sums."""

    day: NotRequired[Annotated[str, Field(description="UTC day on which the requests came.")]]
    tenant: NotRequired[str]
    adapter: NotRequired[Annotated[str, Field(description="Empty for the base model.", examples=["sql"])]]
    key: NotRequired[Annotated[str, Field(description="A key's id.")]]


class UsageSums(TypedDict):
    """Usage in sums. Costs are there if the operator has given prices."""

    object: Literal["usage"]
    since: Annotated[str, Field(description="The first day.")]
    until: Annotated[str, Field(description="The last day.")]
    group_by: list[GroupBy]
    data: list[UsageGroup]
    total: UsageTotal


class UsageRequest(TypedDict):
    """One request, as it was counted."""

    id: Annotated[str, Field(description="What the answer had as `x-request-id`.")]
    object: Literal["usage.request"]
    time: Annotated[_Time, Field(description="When it came.")]
    recorded: Annotated[_Time, Field(description="When it was entered, after its end.")]
    key: str
    model: Annotated[str, Field(description="What answered, as the answer said it.")]
    adapter: str
    version: str
    digest: str
    route: str
    engine: str
    input_tokens: _Count
    cached_tokens: _Count
    output_tokens: _Count
    queue_ms: _Count
    ttft_ms: Annotated[int | None, Field(description="To the first token; null where none came.")]
    duration_ms: _Count
    outcome: Outcome


class UsageRequests(TypedDict):
    """A page of requests, the latest first."""

    object: Literal["list"]
    data: list[UsageRequest]
    has_more: bool
    next_cursor: Annotated[str | None, Field(description="`cursor` of the next page.")]
