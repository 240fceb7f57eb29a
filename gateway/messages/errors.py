"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

from typing import Any

PATH = "/v1/messages"
OVERLOADED = 529
"""What Anthropic answers where others say 503, and its clients know as such."""

_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def speaks_messages(path: str) -> bool:
    """Whether errors on a path are told in Anthropic's shape."""
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(status: int) -> int:
    """Returns Anthropic's status for one of OpenAI's."""
    return OVERLOADED if status == 503 else status


def error_object(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Returns the body of an error, and the data of a stream's error event. `status` is Anthropic's."""
    fallback = "api_error" if status >= 500 else "invalid_request_error"
    error = {"type": _TYPE_OF_STATUS.get(status, fallback), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}
