"""The routes that carry the load, served without what FastAPI puts around every handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.auth import Principal, Requirement

Endpoint = Callable[[Request, Principal], Awaitable[Response]]


class DirectRoutes:
    """ASGI middleware: has a POST to a path of `endpoints` answered by its function, and passes on the rest.

    The functions are FastAPI's handlers, too, which describes them and knows all about other methods. Its
    router, its dependencies and their exit stacks would cost a request more than they do: the caller and the
    request's errors, handled as the app says, are all that such a function needs.
    """

    def __init__(self, app: ASGIApp, *, endpoints: Mapping[str, Endpoint], requirement: Requirement) -> None:
        """`requirement` yields the caller, for all of them."""
        self._app = app
        self._endpoints = endpoints
        self._requirement = requirement

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request, await self._requirement(request))
        except Exception as error:
            response = await handled(request, error)
        await response(scope, receive, send)


async def handled(request: Request, error: Exception) -> Response:
    """Returns the answer of the app's handler for such an error; raises it where there is none."""
    app: FastAPI = request.app
    for kind in type(error).__mro__:
        if kind in app.exception_handlers:
            answer = app.exception_handlers[kind](request, error)
            return answer if isinstance(answer, Response) else await answer
    raise error
