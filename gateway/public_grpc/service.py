"""What the gRPC service answers: each call is a call of an inference route from within the gateway."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from google.protobuf.message import Message
from grpc.aio import ServicerContext

from gateway.api.models import list_models
from gateway.auth import Principal, require
from gateway.deadlines import MAX_TIMEOUT_S
from gateway.errors import ApiError
from gateway.inner_calls import InnerAnswer, InnerCall, InnerCalls
from gateway.origin import Origin
from gateway.public_grpc.bodies import answer_of, chat_body, complete_body, embed_body
from gateway.public_grpc.failures import Failure, Metadata, failure_in_stream, failure_of
from gateway.public_grpc.receiving import abort
from protos import loraplex_pb2 as pb
from protos.loraplex_pb2_grpc import InferenceServicer

logger = logging.getLogger(__name__)

_CHAT, _COMPLETE, _EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_ORIGINS = {_CHAT: Origin("chat"), _COMPLETE: Origin("completions"), _EMBED: Origin("embeddings")}
_SHOWN = ("x-ratelimit-", "retry-after")
_REQUIRE = require("inference")
_CALLER: ContextVar[Principal] = ContextVar("caller")
"""Whose key came with the call that is being answered."""
_KEY_HEADERS = frozenset({"authorization", "x-api-key"})
_LEAST_TIMEOUT_S = 0.001
_MARGIN, _MARGIN_S = 0.05, 0.05
"""Of the time until a call's deadline, and in seconds; the smaller counts."""
_LARGE_BYTES = 64 * 1024
"""Larger messages become bodies in a thread."""

Asked = TypeVar("Asked", bound=Message)


class InferenceService(InferenceServicer):
    """Answers clients' calls. See `protos/loraplex.proto`."""

    def __init__(self, app: FastAPI, calls: InnerCalls) -> None:
        self._app = app
        self._calls = calls

    async def Chat(self, request: pb.ChatRequest, context: ServicerContext) -> pb.ChatResponse:
        """One answer to a conversation."""
        body = await self._answer(_CHAT, partial(chat_body, stream=False), request, context)
        return answer_of(pb.ChatResponse, body)

    async def ChatStream(
        self, request: pb.ChatRequest, context: ServicerContext
    ) -> AsyncIterator[pb.ChatChunk]:
        """The same, as it comes."""
        made = partial(chat_body, stream=True)
        async with aclosing(self._events(_CHAT, made, request, context)) as events:
            async for event in events:
                yield answer_of(pb.ChatChunk, event)

    async def Complete(self, request: pb.CompleteRequest, context: ServicerContext) -> pb.CompleteResponse:
        """Continues texts."""
        body = await self._answer(_COMPLETE, partial(complete_body, stream=False), request, context)
        return answer_of(pb.CompleteResponse, body)

    async def CompleteStream(
        self, request: pb.CompleteRequest, context: ServicerContext
    ) -> AsyncIterator[pb.CompleteChunk]:
        """The same, as it comes."""
        made = partial(complete_body, stream=True)
        async with aclosing(self._events(_COMPLETE, made, request, context)) as events:
            async for event in events:
                yield answer_of(pb.CompleteChunk, event)

    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext) -> pb.EmbedResponse:
        """Makes vectors of texts."""
        import numpy as np  # here, since gateways should start quickly

        body = await self._answer(_EMBED, embed_body, request, context)
        response = answer_of(pb.EmbedResponse, {"model": body["model"], "usage": body["usage"]})
        for each in body["data"]:
            response.embeddings.add().values.extend(np.frombuffer(base64.b64decode(each["embedding"]), "<f4"))
        return response

    async def ListModels(
        self, request: pb.ListModelsRequest, context: ServicerContext
    ) -> pb.ListModelsResponse:
        """What the caller may name as `model`."""
        listed = await list_models(_request_of(self._app, context), _CALLER.get())
        return answer_of(pb.ListModelsResponse, {"models": listed["data"]})

    # ---- calls ------------------------------------------------------------------------------------------

    async def _answer(
        self, path: str, body_of: Callable[[Asked], dict[str, Any]], request: Asked, context: ServicerContext
    ) -> dict[str, Any]:
        """Returns the JSON of a route's answer. Aborts the call where that is an error."""
        call = await self._call(path, body_of, request, context)
        answer = await call.answer()
        context.set_trailing_metadata(_metadata(call))
        if answer.status != 200:
            await abort(context, _failure_of(answer), _metadata(call))
        return orjson.loads(answer.body)

    async def _events(
        self, path: str, body_of: Callable[[Asked], dict[str, Any]], request: Asked, context: ServicerContext
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yields the JSON of each event of a streamed answer. Aborts the call where one is an error."""
        call = await self._call(path, body_of, request, context)
        context.set_trailing_metadata(_metadata(call))
        async with aclosing(call.events()) as events:
            async for event in events:
                if isinstance(event, InnerAnswer):
                    await abort(context, _failure_of(event), _metadata(call))
                value = orjson.loads(event)
                if "error" in value:
                    await abort(context, failure_in_stream(value), _metadata(call))
                yield value
        context.set_trailing_metadata(_metadata(call))  # with what is left of limits

    async def _call(
        self, path: str, body_of: Callable[[Asked], dict[str, Any]], request: Asked, context: ServicerContext
    ) -> InnerCall:
        """Prepares a call of a route. Raises ApiError for what makes no body."""
        is_large = request.ByteSize() > _LARGE_BYTES
        body = await asyncio.to_thread(_json, body_of, request) if is_large else _json(body_of, request)
        return self._calls.prepare(
            path,
            body,
            caller=_CALLER.get(),
            origin=_ORIGINS[path],
            timeout_s=_timeout_s(context.time_remaining()),
        )


async def admit(app: FastAPI, context: ServicerContext) -> None:
    """Takes the key that came with a call, for what answers it. Raises ApiError where it may not infer."""
    request = _request_of(app, context)
    if _KEY_HEADERS.isdisjoint(request.headers):
        raise ApiError(
            401,
            "No API key was given. Send it as metadata, 'authorization: Bearer lpx_...'. grpcurl takes it "
            "by -H 'authorization: Bearer lpx_...'.",
            type="authentication_error",
            code="invalid_api_key",
        )
    _CALLER.set(await _REQUIRE(request))


def _request_of(app: FastAPI, context: ServicerContext) -> Request:
    """Returns a request with a call's metadata as headers, for what looks for a key there."""
    metadata: Any = context.invocation_metadata() or ()
    headers = [(name.encode(), value.encode()) for name, value in metadata if isinstance(value, str)]
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/grpc", "headers": headers, "query_string": b"",
        "app": app, "client": (_host_of(context.peer()), 0), "state": {},
    }  # fmt: skip
    return Request(scope)


def _timeout_s(left_s: float | None) -> float | None:
    """How long a call's request may take: a little less than until the deadline, at which gRPC ends the call
    by itself, without a word of ours.
    """
    if left_s is None:
        return None
    return min(max(left_s - min(_MARGIN_S, _MARGIN * left_s), _LEAST_TIMEOUT_S), MAX_TIMEOUT_S)


def _json(body_of: Callable[[Asked], dict[str, Any]], request: Asked) -> bytes:
    return orjson.dumps(body_of(request))


def _failure_of(answer: InnerAnswer) -> Failure:
    body: Mapping[str, Any] = orjson.loads(answer.body) if answer.body else {}
    return failure_of(answer.status, body, answer.headers)


def _metadata(call: InnerCall) -> Metadata:
    """What goes with an answer beside it: before there is one, only its id."""
    headers = [(name.lower(), value) for name, value in call.headers.items()]
    shown = [(name, value) for name, value in headers if name.startswith(_SHOWN)]
    return (("x-request-id", call.request_id), *shown)


def _host_of(peer: str) -> str:
    """The address in `ipv4:127.0.0.1:5000` and `ipv6:[::1]:5000`, which gRPC may have encoded."""
    return peer.partition(":")[2].rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
