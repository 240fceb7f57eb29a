"""The bodies of the routes that change what an adapter's name means."""

from __future__ import annotations

from pydantic import Field

from adapters.adapter_files import MAX_FILES
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


class FileBody(StrictModel):
    """A file that is to be sent."""

    name: str = Field(max_length=255)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class UploadBody(StrictModel):
    """Body of `POST /v1/adapter-uploads`."""

    name: str
    files: list[FileBody] = Field(min_length=1, max_length=MAX_FILES)
    allow_zero: bool = False
    promote: bool = True


class PullBody(StrictModel):
    """Body of `POST /v1/adapter-pulls`."""

    repo: str = Field(max_length=200)
    revision: str = Field("main", max_length=200)
    name: str
    allow_zero: bool = False
    promote: bool = True
