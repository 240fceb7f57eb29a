"""The bodies of the routes that change what an adapter's name means."""

from __future__ import annotations

from pydantic import Field

from adapters.identity import MAX_VERSION
from gateway.schemas.generation import StrictModel


class PromoteBody(StrictModel):
    """Body of `POST /v1/adapters/{name}/promote`."""

    version: int | None = Field(None, ge=1, le=MAX_VERSION)


class CanaryBody(StrictModel):
    """Body of `PUT /v1/adapters/{name}/canary`."""

    version: int = Field(ge=1, le=MAX_VERSION)
    percent: float = Field(ge=0.01, le=100)


class RenameBody(StrictModel):
    """Body of `POST /v1/adapters/{name}/rename`."""

    name: str
