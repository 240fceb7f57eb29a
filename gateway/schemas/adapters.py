"""The bodies of the routes that change what an adapter's name means."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, WithJsonSchema

from adapters.adapter_files import MAX_FILES
from adapters.identity import MAX_VERSION
from gateway.schemas.generation import StrictModel

NAME_PATTERN = "^[a-z0-9][a-z0-9._-]{0,62}$"
AdapterName = Annotated[str, WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})]
"""What a name may be is checked by `adapters.identity`, whose message has the mend."""


class PromoteBody(StrictModel):
    """Body of `POST /v1/adapters/{name}/promote`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 1}]})

    version: int | None = Field(
        None, ge=1, le=MAX_VERSION, description="Without it the canary, else the newest."
    )


class CanaryBody(StrictModel):
    """Body of `PUT /v1/adapters/{name}/canary`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 2, "percent": 10}]})

    version: int = Field(ge=1, le=MAX_VERSION)
    percent: float = Field(ge=0.01, le=100)


class RenameBody(StrictModel):
    """Body of `POST /v1/adapters/{name}/rename`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "database"}]})

    name: AdapterName


class FileBody(StrictModel):
    """A file that is to be sent."""

    name: str = Field(max_length=255)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class UploadBody(StrictModel):
    """Body of `POST /v1/adapter-uploads`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "sql",
                    "files": [
                        {"name": "adapter_config.json", "bytes": 401, "sha256": "0a" * 32},
                        {"name": "adapter_model.safetensors", "bytes": 1024, "sha256": "1b" * 32},
                    ],
                }
            ]
        }
    )

    name: AdapterName
    files: list[FileBody] = Field(min_length=1, max_length=MAX_FILES)
    allow_zero: bool = Field(False, description="Take an adapter that changes nothing.")
    promote: bool = Field(True, description="`false`: stage it, do not make it live.")


class PullBody(StrictModel):
    """Body of `POST /v1/adapter-pulls`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"repo": "acme/sql-lora", "name": "sql"}]})

    repo: str = Field(max_length=200)
    revision: str = Field("main", max_length=200)
    name: AdapterName
    allow_zero: bool = Field(False, description="Take an adapter that changes nothing.")
    promote: bool = Field(True, description="`false`: stage it, do not make it live.")
