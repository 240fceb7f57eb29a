"""Every error of the gateway in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

On paths of Anthropic's API it is in that one's.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapters.blob_store import StoreUnavailable
from adapters.registry import AdapterConflict, AdapterNotFound
from gateway.messages.errors import error_object, speaks_messages, status_of
from gateway.redaction import redact

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID_HEADER_RAW = REQUEST_ID_HEADER.encode()
_ANTHROPIC_REQUEST_ID_HEADER = b"request-id"

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
QUOTAS = {
    "adapter_quota_exceeded": "adapters",
    "adapter_bytes_quota_exceeded": "adapter_bytes",
    "pin_quota_exceeded": "max_pinned_adapters",
    "pinned_pages_quota_exceeded": "pinned_pages",
    "file_bytes_quota_exceeded": "file_bytes",
}
"""The limit of a tenant that each code of a 409 stands for."""
_LONGEST_PARAM = 256
# What pydantic inserts into a location for the member of a union that it tried.
_UNION_MEMBER = re.compile(r"(?:str|int|float|bool|none|constrained-\w+|list|dict)(?:\[.*\])?")
# A body that is no object, or none; as FastAPI and as pydantic say it.
_NO_OBJECT = frozenset({"missing", "model_attributes_type", "model_type"})
_INTERNAL_MESSAGE = (
    "The server had an error while processing your request. Its request id is in the header x-request-id."
)


class ApiError(Exception):
    """An answer other than success. `message` is for the client's eyes; it names the fault and the mend.

    `param` is the field at fault; `code` a word that programs can compare; `headers` go into the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Returns the JSON object that is the answer's body, and a stream's error event."""
        return error_body(self.message, type=self.type, code=self.code, param=self.param)

    def messages_body(self, request_id: str) -> dict[str, Any]:
        """Returns the same in Anthropic's shape, which has the field at fault in the message."""
        message = self.message
        if self.param is not None and self.param not in message:
            message = f"{self.param}: {message}"
        return error_object(status_of(self.status), redact(message), request_id)


def invalid_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns the 400 for a request that can never succeed as it stands."""
    return ApiError(400, message, type="invalid_request_error", param=param, code=code)


def unavailable(message: str, *, retry_after_s: int = 1, code: str = "engine_unavailable") -> ApiError:
    """Returns the 503 for what may well succeed a little later."""
    return ApiError(503, message, type="server_error", code=code, headers={"Retry-After": str(retry_after_s)})


def store_unavailable(fault: OSError) -> ApiError:
    """Returns the 503 for what a disk or a bucket does, which is no client's business: the log has it."""
    logger.error("the store failed: %s", fault)
    message = "The server cannot use its store at the moment. Try again later, or tell your operator."
    return unavailable(message, retry_after_s=60, code="store_unavailable")


def method_not_allowed(request: Request, allowed: Iterable[str]) -> ApiError:
    """Returns the 405 for a path that answers to other methods only."""
    return ApiError(
        405,
        f"{request.url.path} does not answer to {request.method}.",
        type="invalid_request_error",
        code="method_not_allowed",
        headers={"Allow": ", ".join(sorted(allowed))},
    )


def methods_of(error: Exception) -> list[str]:
    """Returns the methods that Starlette's 405 names."""
    headers = error.headers if isinstance(error, HTTPException) else None
    return (headers or {}).get("Allow", "").split(", ")


def error_body(
    message: str, *, type: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Returns OpenAI's error object. A key that was sent in a wrong place does not come back whole."""
    named = redact(param) if param else None
    return {"error": {"message": redact(message), "type": type, "param": named, "code": code}}


def error_response(error: ApiError) -> Response:
    """Returns the HTTP response for an error, which finds its shape by the path that it goes out on."""
    return _ErrorResponse(error)


class _ErrorResponse(Response):
    def __init__(self, error: ApiError) -> None:
        super().__init__(orjson.dumps(error.body()), error.status, error.headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        if speaks_messages(scope["path"]):
            self.body = orjson.dumps(self._error.messages_body(scope["state"]["request_id"]))
            self.status_code = status_of(self.status_code)
            self.init_headers(self._error.headers)
        await super().__call__(scope, receive, send)


def install_error_handling(app: FastAPI) -> None:
    """Makes every error of the app, from unknown routes on, come out in OpenAI's shape. The app must be
    within an ErrorBoundary, for bugs.
    """
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    for away in (RedisConnectionError, RedisTimeoutError):
        app.add_exception_handler(away, _on_redis_away)
    app.add_exception_handler(StoreUnavailable, _on_store_away)
    app.add_exception_handler(AdapterNotFound, _on_adapter_not_found)
    app.add_exception_handler(AdapterConflict, _on_adapter_conflict)
    app.add_exception_handler(Exception, _on_bug)


class ErrorBoundary:
    """ASGI middleware: counts responses, gives each an `x-request-id`, and answers 500 for what none caught.

    The client learns nothing of the fault but the id; the log holds the traceback under the same id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; passes other kinds of scope through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {}).update(request_id=request_id, arrived_at=time.perf_counter())
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] += id_headers(scope)
                count_response(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            error = internal_error(scope)
            if not started:
                await error_response(error)(scope, receive, send_with_id)


def id_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Returns the headers that tell a client the id of its request."""
    request_id = scope["state"]["request_id"].encode()
    headers = [(_REQUEST_ID_HEADER_RAW, request_id)]
    if speaks_messages(scope["path"]):
        headers.append((_ANTHROPIC_REQUEST_ID_HEADER, request_id))
    return headers


def count_response(scope: Scope, status: int) -> None:
    """Counts an answer that begins now."""
    scope["app"].state.services.metrics.responded(scope["path"], status)


def internal_error(scope: Scope) -> ApiError:
    """Returns the 500 for the exception that is being handled, whose traceback it logs."""
    request_id = scope["state"]["request_id"]
    logger.exception("request %s (%s %r) failed", request_id, scope["method"], scope["path"])
    return ApiError(500, _INTERNAL_MESSAGE, type="server_error", code="internal_error")


async def _on_bug(_: Request, error: Exception) -> Response:
    """Leaves a bug to the ErrorBoundary: Starlette would answer it with a line of text."""
    raise error


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    _count_quota(request, error.code)
    return error_response(error)


def _count_quota(request: Request, code: str | None) -> None:
    """Counts what a tenant's quota has refused among the rejections by limits."""
    if code in QUOTAS:
        request.app.state.services.metrics.rejected(request.state.caller.tenant_id, "", QUOTAS[code])


async def _on_redis_away(_: Request, error: Exception) -> Response:
    """What cannot be answered from memory while Redis is away."""
    logger.debug("Redis is away: %s", error)
    message = "The record of tenants and adapters cannot be reached. Try again shortly."
    return error_response(unavailable(message, code="registry_unavailable"))


async def _on_store_away(_: Request, error: Exception) -> Response:
    assert isinstance(error, StoreUnavailable)
    return error_response(store_unavailable(error))


async def _on_adapter_not_found(_: Request, error: Exception) -> Response:
    """The same whether another tenant has an adapter of this name or nobody has."""
    found = ApiError(404, str(error), type="invalid_request_error", code="adapter_not_found", param="name")
    return error_response(found)


async def _on_adapter_conflict(request: Request, error: Exception) -> Response:
    assert isinstance(error, AdapterConflict)
    _count_quota(request, error.code)
    return error_response(
        ApiError(409, error.message, type="invalid_request_error", code=error.code, param="name")
    )


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own errors: an unknown route or method, a body that cannot be read."""
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"There is no route {request.method} {request.url.path}.", "unknown_url"
    elif error.status_code == 405:
        return error_response(method_not_allowed(request, methods_of(error)))
    kind = _TYPE_OF_STATUS.get(error.status_code, "server_error")
    return error_response(ApiError(error.status_code, message, type=kind, code=code, headers=error.headers))


async def _on_validation_error(_: Request, error: Exception) -> Response:
    """A body or parameter that pydantic refuses. Only the first fault is told, as OpenAI does."""
    assert isinstance(error, RequestValidationError)
    # FastAPI begins each location with where the value was: "body", "path".
    faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
    return error_response(validation_error(faults))


def validation_error(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """Returns the 400 for pydantic's list of faults: `param` names the field as `messages[0].content`."""
    fault = min(faults, key=_rank)
    within = (fault["ctx"]["field"],) if fault["type"] == "field_conflict" else ()
    param = _param_of((*fault["loc"], *within))
    if fault["type"] == "json_invalid":
        return invalid_request("The request's body is not valid JSON.", code="invalid_json")
    if fault["type"] == "extra_forbidden":
        return invalid_request(f"Unrecognized request argument supplied: {param}", param=param)
    if param is None and fault["type"] in _NO_OBJECT:
        return invalid_request(
            "The request's body must be a JSON object, sent with 'Content-Type: application/json'."
        )
    if fault["type"] == "missing":
        return invalid_request(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    if fault["type"] == "unsupported":
        return invalid_request(fault["msg"], param=param, code="unsupported_parameter")
    message = (
        f"Invalid value for '{param}': {fault['msg']}." if param else f"Invalid request: {fault['msg']}."
    )
    return invalid_request(message, param=param, code="invalid_value")


def _rank(fault: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """Orders faults by how much they tell.

    An unknown or unsupported field is often why the rest does not fit. Of a field with several permitted
    types, pydantic tells a fault per type: one of another kind than "wrong type" is about the type that was
    meant, and a deep one knows more than a shallow one.
    """
    known = fault["type"] not in ("extra_forbidden", "unsupported")
    return known, fault["type"].endswith("_type"), -len(fault["loc"])


def _param_of(location: Sequence[str | int]) -> str | None:
    """Turns `("messages", 0, "content", "list[TextPart]", 1, "text")` into `messages[0].content[1].text`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _UNION_MEMBER.fullmatch(part) is None:
            path += f".{part}" if path else part
    return path[:_LONGEST_PARAM] or None
