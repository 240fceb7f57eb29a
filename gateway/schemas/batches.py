"""The bodies of `/v1/files` and `/v1/batches`, and what they answer."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from gateway.batches.files import KEPT_S
from gateway.schemas.answers import Created
from gateway.schemas.generation import AtMost, StrictModel, fault

LEAST_KEPT_S, MOST_KEPT_S = 3600, KEPT_S
MOST_HOURS = 168
_WINDOW = re.compile(r"[1-9][0-9]{0,2}h")

FileId = Annotated[str, Field(pattern="^file-[0-9a-f]{24}$", examples=["file-5f0c6a1be2d34f7a9c8b7d6e"])]
BatchId = Annotated[str, Field(pattern="^batch_[0-9a-f]{24}$", examples=["batch_5f0c6a1be2d34f7a9c8b7d6e"])]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
Moment = Annotated[int | None, Field(description="Unix time in seconds; null before.")]


class OutputExpiry(StrictModel):
    """How long what a batch writes is kept."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_KEPT_S, le=MOST_KEPT_S)


class CreateBatch(StrictModel):
    """Requests of a file, to be answered within some hours in what other work leaves over."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "input_file_id": "file-5f0c6a1be2d34f7a9c8b7d6e",
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                    "metadata": {"run": "7"},
                }
            ]
        }
    )

    input_file_id: str = Field(max_length=64, description="A file with the purpose `batch`.")
    endpoint: Endpoint = Field(description="The `url` of every line.")
    completion_window: str = Field(
        max_length=8,
        description=f"`24h`, or another number of hours up to {MOST_HOURS}; what is left then is dropped.",
        json_schema_extra={"pattern": "^([1-9][0-9]?|1[0-5][0-9]|16[0-8])h$"},
    )
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, AtMost(16)
    ] = Field(None, description="Comes back with the batch.")
    output_expires_after: OutputExpiry | None = Field(
        None, description="When the files that it writes go; after 30 days by default."
    )

    @model_validator(mode="after")
    def _window_is_known(self) -> CreateBatch:
        if not _WINDOW.fullmatch(self.completion_window) or self.hours > MOST_HOURS:
            raise fault("completion_window", f"it is '24h', or another number of hours up to {MOST_HOURS}")
        return self

    @property
    def hours(self) -> int:
        """The window in hours."""
        return int(self.completion_window[:-1])

    @property
    def output_kept_s(self) -> int:
        """How long its files are kept."""
        return self.output_expires_after.seconds if self.output_expires_after else KEPT_S


class FileForm(TypedDict):
    """The form of an upload."""

    file: Annotated[bytes, Field(description="JSON lines, with a filename.")]
    purpose: Annotated[Literal["batch"], Field(description="What for.")]


class File(TypedDict):
    """A file that is kept here."""

    id: FileId
    object: Literal["file"]
    bytes: Annotated[int, Field(ge=0)]
    created_at: Created
    expires_at: Created
    filename: Annotated[str, Field(examples=["requests.jsonl"])]
    purpose: Annotated[str, Field(examples=["batch", "batch_output"])]
    status: Literal["processed"]


class FileList(TypedDict):
    """Some of the tenant's files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(TypedDict):
    """A file that is gone."""

    id: FileId
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(TypedDict):
    """What is wrong with the input."""

    code: Annotated[str, Field(examples=["invalid_json_line"])]
    message: str
    param: str | None
    line: Annotated[int | None, Field(description="Which line of the file, from 1 on.")]


class BatchErrors(TypedDict):
    """The first hundred faults."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(TypedDict):
    """How far it is."""

    total: int
    completed: int
    failed: Annotated[int, Field(description="Those in the error file.")]


class Batch(TypedDict):
    """A batch as it is now."""

    id: BatchId
    object: Literal["batch"]
    endpoint: Endpoint
    errors: BatchErrors | None
    input_file_id: FileId
    completion_window: Annotated[str, Field(examples=["24h"])]
    status: Literal[
        "validating",
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: Annotated[str | None, Field(description="The answers, once it has ended.")]
    error_file_id: Annotated[str | None, Field(description="What was refused or not done, then.")]
    created_at: Created
    expires_at: Created
    in_progress_at: Moment
    finalizing_at: Moment
    completed_at: Moment
    failed_at: Moment
    expired_at: Moment
    cancelling_at: Moment
    cancelled_at: Moment
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """Some of the tenant's batches, the newest first."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
