"""The inference routes, called from within the gateway: for batches, and for clients that speak gRPC.

A call goes the way of an HTTP request from the caller's authentication on: the same checks, limits, ledger
and answers, in OpenAI's JSON. There is no socket, and a call ends early by `close`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from starlette.types import Message

from gateway.auth import Principal
from gateway.deadlines import TIMEOUT_HEADER
from gateway.direct import Endpoint, handled
from gateway.errors import error_response, internal_error
from gateway.origin import Origin
from gateway.sse import EventStream

_EVENT = b"data: "
_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class InnerAnswer:
    """What a route has answered. `body` is JSON."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    request_id: str


class InnerCall:
    """One call of one route. For one task, but for `close`."""

    def __init__(
        self,
        app: FastAPI,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        *,
        caller: Principal,
        origin: Origin,
        timeout_s: float | None = None,
    ) -> None:
        """`timeout_s` is how long it may take, as an `X-Request-Timeout` says it."""
        self.request_id = f"req_{secrets.token_hex(12)}"
        self.headers: Mapping[str, str] = {}
        """Those of what the route has answered, once it has."""
        self._endpoint = endpoint
        self._caller = caller
        self._body: bytes | None = body
        self._closed = asyncio.Event()
        headers = [(b"content-type", b"application/json")]
        if timeout_s is not None:
            headers.append((TIMEOUT_HEADER.encode(), str(timeout_s).encode()))
        state = {
            "request_id": self.request_id,
            "arrived_at": time.perf_counter(),
            "caller": caller,
            "origin": origin,
        }
        self._scope = {
            "type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"",
            "app": app, "state": state,
        }  # fmt: skip

    def close(self) -> None:
        """Ends the call as a client does that goes away. May be called again."""
        self._closed.set()

    async def answer(self) -> InnerAnswer:
        """Runs a call that is not streamed. Its status is 499 when it was closed first."""
        return self._whole(await self._respond())

    async def events(self) -> AsyncGenerator[InnerAnswer | bytes]:
        """Runs a streamed call: yields the JSON of each event but the last, which says only that it ends.

        What fails before the first event is one `InnerAnswer`, and so is an answer that is no stream.
        """
        response = await self._respond()
        if not isinstance(response, EventStream):
            yield self._whole(response)
            return
        chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                chunks.put_nowait(message["body"])

        async def run() -> None:
            try:
                await response(self._scope, self._receive, send)
            finally:
                chunks.put_nowait(None)

        running = asyncio.create_task(run(), name="inner-call")
        try:
            while (chunk := await chunks.get()) is not None:
                for event in chunk.split(_END):
                    data = event.removeprefix(_EVENT)
                    if data and data != b"[DONE]":
                        yield data
        finally:
            self.close()
            await asyncio.wait([running])

    def _whole(self, response: Response) -> InnerAnswer:
        return InnerAnswer(response.status_code, bytes(response.body), self.headers, self.request_id)

    async def _respond(self) -> Response:
        """The route's response. A caller that is cancelled meanwhile ends the call as a client that goes."""
        responding = asyncio.ensure_future(self._run())
        try:
            response = await asyncio.shield(responding)
        except asyncio.CancelledError:
            self.close()
            await asyncio.wait([responding])
            if isinstance(response := responding.result(), EventStream):
                await response.aclose()  # else only the collector would end it
            raise
        self.headers = dict(response.headers)
        return response

    async def _run(self) -> Response:
        request = Request(self._scope, self._receive)
        try:
            return await self._endpoint(request, self._caller)
        except Exception as error:
            try:
                return await handled(request, error)
            except Exception:
                return error_response(internal_error(self._scope))

    async def _receive(self) -> Message:
        """The body, once; and then the client's going, when it is closed."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}


class InnerCalls:
    """Makes calls of the app's inference routes."""

    def __init__(self, app: FastAPI, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    @property
    def paths(self) -> frozenset[str]:
        """The routes that there are."""
        return frozenset(self._endpoints)

    def prepare(
        self, path: str, body: bytes, *, caller: Principal, origin: Origin, timeout_s: float | None = None
    ) -> InnerCall:
        """Returns a call of the route at `path`, which is one of `paths`. Nothing runs yet."""
        return InnerCall(
            self._app, self._endpoints[path], path, body, caller=caller, origin=origin, timeout_s=timeout_s
        )
