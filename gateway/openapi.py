"""The OpenAPI description: what FastAPI finds out, and what it cannot know.

FastAPI knows paths, parameters and the bodies that it reads. Added here: answers and bodies as `described`
beside each route, the errors that follow from a route's key, parameters and body, and the key itself. The 422
that FastAPI assumes is taken out: a request that is not right gets 400.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.auth import Requirement
from gateway.described import EVENTS, JSON, Description, description_of
from gateway.errors import error_response, method_not_allowed, methods_of
from gateway.messages.errors import speaks_messages, status_of
from gateway.schemas.answers import ErrorBody
from gateway.schemas.message_answers import MessageEvent, MessagesErrorBody

_REF = "#/components/schemas/{model}"
_KEY, _ANTHROPIC_KEY = "key", "anthropicKey"

_ABOUT = """\
Many fine-tunes of one model behind OpenAI's API, and Anthropic's Messages. Send a key as
`Authorization: Bearer KEY`, or as `x-api-key: KEY`. Every error has OpenAI's shape, or below `/v1/messages`
Anthropic's, and every answer the header `x-request-id`.
"""

_TAGS = (
    ("inference", "Chats, messages and text completions, whole or as server-sent events. Scope `inference`."),
    ("batches", "Files of requests, answered in what other work leaves over. Scope `inference`."),
    ("models", "What may be named as `model`. Scope `inference`."),
    ("adapters", "A tenant's own adapters: uploads, versions, aliases, grants. Scope `adapters`."),
    ("admin", "The operator's: tenants, their keys, limits and what was done. Scope `admin`."),
    ("usage", "What was used, by tenant, adapter and day."),
    ("health", "For orchestrators and Prometheus. No key."),
)

_ERRORS = {
    400: "The request can never succeed as it stands: `param` names the field.",
    401: "The key is absent, unknown, revoked or expired.",
    403: "The key lacks the scope, its tenant is suspended, or the operator does not allow it.",
    404: "There is no such model, adapter, tenant or key; the same for somebody else's.",
    408: "The body did not arrive in time.",
    409: "What is there does not allow it: the message has the mend.",
    413: "The body, or the upload, is larger than what is taken.",
    415: "The body is of a media type or content encoding that is not read.",
    429: "A limit, or too many wrong keys: the message says which, and `Retry-After` when to try again.",
    500: "The engine failed on this request, or the gateway has a bug.",
    502: "The hub that the adapter was to come from is at fault.",
    503: "No engine, no Redis or no store just now: `Retry-After` says when to try again.",
    504: "The request took longer than its deadline.",
}

_INTEGER = {"type": "integer", "minimum": 0}
_RESPONSE_HEADERS = {
    "RequestId": {"description": "The request's id, as in the gateway's log.", "schema": {"type": "string"}},
    "RetryAfter": {"description": "Seconds after which to try again.", "schema": _INTEGER},
    "Limit": {"description": "A limit that is set: how much a minute.", "schema": _INTEGER},
    "Remaining": {"description": "What is left of it.", "schema": _INTEGER},
    "Reset": {
        "description": "In how long all of it can be had again.",
        "schema": {"type": "string"},
        "example": "6m0s",
    },
    "Authenticate": {"description": "How to authenticate.", "schema": {"type": "string"}},
}
_LIMIT_HEADERS = {
    f"x-ratelimit-{part}-{kind}": name
    for kind in ("requests", "tokens", "input-tokens", "output-tokens")
    for part, name in (("limit", "Limit"), ("remaining", "Remaining"), ("reset", "Reset"))
}
"""What an answer to inference may have, for limits that are set."""

_HEADERS_OF_ERROR = {
    401: {"WWW-Authenticate": "Authenticate"},
    429: {"Retry-After": "RetryAfter"},
    503: {"Retry-After": "RetryAfter"},
}

_REQUEST_HEADERS = {
    "Upload-Offset": (
        "At which byte of the file the body begins.",
        True,
        {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
        0,
    ),
    "X-Request-Timeout": (
        "Seconds that the request may take, in the queue and in all; then it ends with 504.",
        False,
        {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400},
        30,
    ),
}
"""Headers that endpoints read by themselves: what they mean, whether they must be there, schema, example."""

_PARAMETERS = {
    "name": ("An adapter's name; `name@version` where one version is meant.", "sql"),
    "tenant": ("Another tenant's id.", "globex"),
    "file": ("A file's name.", "adapter_config.json"),
    "file_name": ("The name of a file that was announced.", "adapter_model.safetensors"),
    "upload_id": ("The id that the upload began with.", "0123456789abcdef0123456789abcdef"),
    "tenant_id": ("A tenant's id.", "acme"),
    "key_id": ("A key's id, which is the middle part of its text.", "0f3a9c1d2e4b"),
    "file_id": ("A file's id.", "file-5f0c6a1be2d34f7a9c8b7d6e"),
    "batch_id": ("A batch's id.", "batch_5f0c6a1be2d34f7a9c8b7d6e"),
    "limit": ("The most that is listed.", 100),
    "cursor": ("What the page before said comes next.", "1796000000000-0"),
    "dry_run": ("Say what would be done, and do nothing.", True),
    "action": ("`key.revoke`, or `key.` for all that begin so.", "key."),
    "from": ("The number of a version.", 1),
    "to": ("The number of another one; the live one by default.", 2),
}


class DescribedApp(FastAPI):
    """A FastAPI application whose description is complete, where all routes came by `include`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            description=_ABOUT,
            openapi_tags=[{"name": name, "description": text} for name, text in _TAGS],
            generate_unique_id_function=lambda route: route.name,
            **options,
        )
        self._included: list[APIRouter] = []
        self._around: ASGIApp = super().__call__
        self.add_exception_handler(405, self._on_wrong_method)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or the app's life."""
        scope["app"] = self
        await self._around(scope, receive, send)

    def wrap(self, middleware: Callable[..., ASGIApp], **options: Any) -> None:
        """Puts ASGI middleware around all there is: outside of FastAPI's own, which is five layers, and of
        `add_middleware`'s.
        """
        self._around = middleware(self._around, **options)

    def include(self, router: APIRouter) -> None:
        """Adds a router's routes."""
        self._included.append(router)
        self.include_router(router)

    def openapi(self) -> dict[str, Any]:
        """Returns the description. Made once, which takes a while."""
        if self.openapi_schema is None:
            _complete(super().openapi(), list(self.described_routes()))
        return super().openapi()

    async def _on_wrong_method(self, request: Request, error: Exception) -> Response:
        """Names all methods that the path answers to: Starlette knows those of one route."""
        found = [route for route in self.described_routes() if route.matches(request.scope)[0] != Match.NONE]
        allowed = {method for route in found for method in route.methods or ()}
        return error_response(method_not_allowed(request, allowed or methods_of(error)))

    def described_routes(self) -> Iterator[APIRoute]:
        """Yields all routes that are in the description."""
        for router in self._included:
            yield from (route for route in router.routes if isinstance(route, APIRoute))


def _complete(document: dict[str, Any], routes: Sequence[APIRoute]) -> None:
    """Puts into FastAPI's document what it lacks."""
    descriptions = [description_of(route.endpoint) for route in routes]
    schema_of = _Schemas(descriptions)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(schema_of.definitions)
    components["schemas"] = dict(sorted(schemas.items()))
    components["responses"] = {
        _name_of(status, messages=messages): _error_response(status, schema_of, messages=messages)
        for messages in (False, True)
        for status in _ERRORS
    }
    components["headers"] = _RESPONSE_HEADERS
    components["securitySchemes"] = {
        _KEY: {"type": "http", "scheme": "bearer", "bearerFormat": "lpx_..."},
        _ANTHROPIC_KEY: {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for route, description in zip(routes, descriptions, strict=True):
        for method in route.methods or ():
            operation = document["paths"][route.path_format][method.lower()]
            _describe(operation, route, description, schema_of)


def _describe(
    operation: dict[str, Any], route: APIRoute, description: Description, schema_of: _Schemas
) -> None:
    """Completes one operation."""
    for parameter in operation.get("parameters", ()):
        if "description" not in parameter and parameter["name"] in _PARAMETERS:
            parameter["description"], parameter["example"] = _PARAMETERS[parameter["name"]]
        _drop_null(parameter["schema"])
    for header in description.headers:
        operation.setdefault("parameters", []).append(_header_parameter(header))
    if description.body is not None:
        content = {description.body_media: {"schema": schema_of(description.body, "validation")}}
        operation["requestBody"] = {"required": True, "content": content}
    has_key = any(isinstance(part.call, Requirement) for part in route.dependant.dependencies)
    if has_key:
        operation["security"] = [{_KEY: []}, {_ANTHROPIC_KEY: []}]
    success = {
        "description": "It worked.",
        "headers": _headers(_LIMIT_HEADERS if "inference" in route.tags else {}),
        "content": _content(description, schema_of),
    }
    responses: dict[str, Any] = {str(route.status_code or 200): success}
    for status, answer in description.also.items():
        responses[str(status)] = {
            "description": _ERRORS[status],
            "headers": _headers({}),
            "content": {JSON: {"schema": schema_of(answer, "serialization")}},
        }
    messages = speaks_messages(route.path_format)
    for status in _errors_of(operation, description, has_key=has_key):
        name = _name_of(status, messages=messages)
        responses.setdefault(
            str(status_of(status) if messages else status), {"$ref": f"#/components/responses/{name}"}
        )
    operation["responses"] = responses


def _drop_null(schema: dict[str, Any]) -> None:
    """A parameter that may be absent cannot be null: there is no way to say so in a URL."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind.get("type") != "null"]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema.update(kinds[0])


def _errors_of(operation: Mapping[str, Any], description: Description, *, has_key: bool) -> Sequence[int]:
    """The errors that a route may answer: what was said of it, and what follows from what it takes."""
    parameters, body = operation.get("parameters", ()), "requestBody" in operation
    found = set(description.errors)
    if has_key:
        found |= {401, 403, 429, 503}
    if parameters or body:
        found.add(400)
    if any(parameter["in"] == "path" for parameter in parameters):
        found.add(404)
    if body:
        found |= {408, 413, 415}
    return sorted(found)


def _content(description: Description, schema_of: _Schemas) -> dict[str, Any]:
    """The media types of a success."""
    content: dict[str, Any] = {}
    if description.answer is not None:
        content[JSON] = {"schema": schema_of(description.answer, "serialization")}
    for media, kind in description.media.items():
        content[media] = {"schema": _event(kind, schema_of) if media == EVENTS else {"type": "string"}}
    return content


def _event(kind: Any, schema_of: _Schemas) -> dict[str, Any]:
    """One event of a stream: before OpenAPI 3.2, the schema of an event stream is understood to be this."""
    if kind is MessageEvent:
        return _message_event(schema_of)
    kinds = [schema_of(kind, "serialization"), schema_of(ErrorBody, "serialization")]
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": kinds}}
    return {
        "type": "object",
        "description": "An event of the stream. The last one's data is `[DONE]`; a failure after the first "
        "token is an event whose data is an `ErrorBody`, and goes before that.",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }


def _message_event(schema_of: _Schemas) -> dict[str, Any]:
    """The same of Anthropic's streams, whose events have names."""
    kinds = [schema_of(kind, "serialization") for kind in (MessageEvent, MessagesErrorBody)]
    return {
        "type": "object",
        "description": "An event of the stream; its name is its data's `type`. A failure after the first "
        "token is the last event, `error`.",
        "required": ["event", "data"],
        "properties": {
            "event": {"type": "string"},
            "data": {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": kinds}},
        },
    }


def _error_response(status: int, schema_of: _Schemas, *, messages: bool) -> dict[str, Any]:
    return {
        "description": _ERRORS[status],
        "headers": _headers(_HEADERS_OF_ERROR.get(status, {})),
        "content": {
            JSON: {"schema": schema_of(MessagesErrorBody if messages else ErrorBody, "serialization")}
        },
    }


def _headers(more: Mapping[str, str]) -> dict[str, Any]:
    named = {"x-request-id": "RequestId", **more}
    return {header: {"$ref": f"#/components/headers/{name}"} for header, name in named.items()}


def _header_parameter(name: str) -> dict[str, Any]:
    text, required, schema, example = _REQUEST_HEADERS[name]
    return {
        "name": name,
        "in": "header",
        "required": required,
        "description": text,
        "schema": schema,
        "example": example,
    }


def _name_of(status: int, *, messages: bool) -> str:
    return f"MessagesError{status_of(status)}" if messages else f"Error{status}"


class _Schemas:
    """JSON schemas of the types that descriptions name, all made at once so that each has one definition."""

    def __init__(self, descriptions: Sequence[Description]) -> None:
        answers = [ErrorBody, MessagesErrorBody]
        for description in descriptions:
            answers += [description.answer, *description.also.values()]
            answers += [kind for media, kind in description.media.items() if media == EVENTS]
        bodies = [description.body for description in descriptions]
        modes: list[tuple[Any, JsonSchemaMode]] = [
            *((kind, "serialization") for kind in answers if kind is not None),
            *((kind, "validation") for kind in bodies if kind is not None),
        ]
        wanted: list[tuple[Hashable, JsonSchemaMode, TypeAdapter[Any]]] = [
            (id(kind), mode, TypeAdapter(kind)) for kind, mode in dict.fromkeys(modes)
        ]
        self._by_type, document = TypeAdapter.json_schemas(wanted, ref_template=_REF)
        self.definitions: dict[str, Any] = document.get("$defs", {})

    def __call__(self, kind: Any, mode: JsonSchemaMode) -> dict[str, Any]:
        """Returns the schema of a type: as a rule a reference to its definition."""
        return self._by_type[id(kind), mode]
