"""Server-sent events: one write per chunk, and an end at once when the client goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.disconnects import DisconnectWatch
from gateway.errors import ApiError, internal_error, unavailable
from gateway.messages.errors import speaks_messages

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
STOPPING = "The server is stopping. Try again."


def event(data: object) -> bytes:
    """Returns one event with `data` as JSON."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """Returns one event with `data` as JSON, whose name is its `type`."""
    return b"event: %b\n" % data["type"].encode() + event(data)


class EventStream(Response):
    """A streamed answer. `on_disconnect` is called once if
    the client goes first; `events` must end soon after that.

    An ApiError that `events` raises becomes an error event, since the status has long been sent. So does a
    fault of ours, and the cancellation of the request's task, which is how the server ends what outlasts its
    time to stop.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes], *, on_disconnect: Callable[[], None]
    ) -> None:
        """`first` goes out before what `events` yields."""
        self._first = first
        self._events = events
        self._on_disconnect = on_disconnect
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def aclose(self) -> None:
        """Ends the events of an answer that will not be sent."""
        await self._events.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events. Their generator is closed in any case."""
        failure: ApiError | None = None
        async with DisconnectWatch(scope, receive, self._on_disconnect), aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await send(_body(self._first))
                async for chunk in self._events:
                    await send(_body(chunk))
            except ApiError as error:
                logger.info("a stream ended with an error: %s", error.message)
                failure = error
            except asyncio.CancelledError:
                failure = unavailable(STOPPING)
            except Exception:
                failure = internal_error(scope)
            body = _ending(scope, failure)
            await send({"type": "http.response.body", "body": body, "more_body": False})


def _ending(scope: Scope, failure: ApiError | None) -> bytes:
    """What a stream ends with, as the API has it whose path it is on: Anthropic's needs no mark."""
    if speaks_messages(scope["path"]):
        request_id = scope["state"]["request_id"]
        return b"" if failure is None else named_event(failure.messages_body(request_id))
    return DONE if failure is None else event(failure.body()) + DONE


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}
