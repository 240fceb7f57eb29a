"""Asks for the key before a call's message is received: strangers send little, and have nothing parsed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from grpc.aio import ServerInterceptor, ServicerContext

from gateway.errors import ApiError
from gateway.public_grpc.failures import failure_of_error
from gateway.public_grpc.receiving import abort, each_message, one_message

Check = Callable[[ServicerContext], Awaitable[object]]
"""Raises ApiError for a call without a key that may make it."""
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class KeyFirst(ServerInterceptor):
    """Ends the calls of some services that come without a key that may make them, and those whose messages do
    not parse. Other services are open.
    """

    def __init__(self, check: Check, most_bytes: Mapping[str, int]) -> None:
        """`most_bytes` has the services that want a key, and how large a message of each may be."""
        self._check = check
        self._most_bytes = most_bytes

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the call's handler, behind the check where there is one: not before it has been called does
        the call say where it comes from.
        """
        details: Any = handler_call_details
        handler = await continuation(handler_call_details)
        most_bytes = self._most_bytes.get(details.method[1:].rpartition("/")[0])
        if handler is None or most_bytes is None:
            return handler

        async def checked(_: AsyncIterator[bytes], context: ServicerContext) -> None:
            try:
                await self._check(context)
                await _answer(handler, context, most_bytes)
            except ApiError as error:
                await abort(context, failure_of_error(error))

        # Of streams, since only their handlers are called before a message has been received.
        return grpc.stream_stream_rpc_method_handler(
            checked,  # pyright: ignore[reportArgumentType]
            response_serializer=handler.response_serializer,
        )


async def _answer(handler: Any, context: ServicerContext, most_bytes: int) -> None:
    """Has a handler of messages answer a call whose messages have not been parsed. Raises ApiError 400."""
    parse = handler.request_deserializer
    if handler.request_streaming:
        asked: Any = each_message(context, parse, most_bytes)
    else:
        asked = await one_message(context, parse, most_bytes)
    if not handler.response_streaming:
        await context.write(await (handler.stream_unary or handler.unary_unary)(asked, context))
        return
    async with aclosing((handler.stream_stream or handler.unary_stream)(asked, context)) as answers:
        async for answer in answers:
            await context.write(answer)
