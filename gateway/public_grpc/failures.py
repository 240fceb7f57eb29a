"""Errors of the HTTP API as gRPC statuses, with details."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage

from gateway.errors import ApiError
from protos.loraplex_pb2 import Error, Status

DETAILS_KEY = "grpc-status-details-bin"
Metadata = tuple[tuple[str, str | bytes], ...]

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_STATUSES_IN_STREAM = {"deadline_exceeded": 504, "generation_failed": 500, "internal_error": 500}
"""Of errors in the middle of a stream, which do not say theirs: the others are 503."""


class Failure(Exception):
    """How a call ends that has no answer."""

    def __init__(self, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.metadata = metadata


def failure_of_error(error: ApiError) -> Failure:
    """Returns the failure for an error that was raised before the call had a route, and with that an id."""
    failure = failure_of(error.status, error.body(), error.headers or {})
    request_id = f"req_{secrets.token_hex(12)}"
    return Failure(failure.code, failure.message, (("x-request-id", request_id), *failure.metadata))


def failure_of(status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> Failure:
    """Returns the failure for an error's status and body."""
    fault: dict[str, Any] = body.get("error") or {"message": "The call was ended."}
    retry_after = {name.lower(): value for name, value in headers.items()}.get("retry-after", "0")
    error = Error(
        message=fault["message"],
        type=fault.get("type") or "",
        param=fault.get("param") or "",
        code=fault.get("code") or "",
        http_status=status,
        retry_after_s=int(retry_after),
    )
    code = _CODES.get(status, grpc.StatusCode.INTERNAL if status >= 500 else grpc.StatusCode.INVALID_ARGUMENT)
    packed = AnyMessage()
    packed.Pack(error)
    details = Status(code=code.value[0], message=error.message, details=[packed])
    return Failure(code, error.message, ((DETAILS_KEY, details.SerializeToString()),))


def failure_in_stream(body: Mapping[str, Any]) -> Failure:
    """Returns the failure for an error event."""
    return failure_of(_STATUSES_IN_STREAM.get(body["error"].get("code"), 503), body, {})
