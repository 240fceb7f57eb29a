"""Asks for the key before a call's message is received: strangers send little, and have nothing parsed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc.aio import ServerInterceptor, ServicerContext

from gateway.errors import ApiError
from gateway.public_grpc.failures import failure_of_error

Check = Callable[[Any], Awaitable[object]]
"""Raises ApiError for metadata without a key that may call."""
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class KeyFirst(ServerInterceptor):
    """Ends the calls of one service that come without a key that may make them. Other services are open."""

    def __init__(self, service: str, check: Check) -> None:
        self._prefix = f"/{service}/"
        self._check = check

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Returns the call's handler, or one that says why there is none."""
        details: Any = handler_call_details
        if details.method.startswith(self._prefix):
            try:
                await self._check(details.invocation_metadata)
            except ApiError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: ApiError) -> grpc.RpcMethodHandler:
    failure = failure_of_error(error)

    async def refuse(requests: AsyncIterator[bytes], context: ServicerContext) -> NoReturn:
        await context.abort(failure.code, failure.message, failure.metadata)
        raise AssertionError("abort raises")

    return grpc.stream_stream_rpc_method_handler(refuse)  # pyright: ignore[reportArgumentType]
