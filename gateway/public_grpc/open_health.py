"""gRPC's standard health service, for anybody: strangers can neither fill memory through it nor close it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from grpc.aio import Server, ServicerContext
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health import aio as health_aio  # pyright: ignore[reportAttributeAccessIssue]

from adapters.loop_timeout import LoopTimeout
from gateway.errors import ApiError
from gateway.public_grpc.failures import failure_of_error
from gateway.public_grpc.receiving import abort, one_message

_MOST_READ = 4
"""Messages that are received at once: gRPC does so whole, and up to the port's bound."""
_READ_S = 5.0
_MOST_BYTES = 1024
_MOST_WATCHING = 250
"""Far fewer than the streams of a connection, of which a proxy may make one for all."""

Handle = Callable[[AsyncIterator[bytes], ServicerContext], Awaitable[None]]


class OpenHealth:
    """Says of each name in `services` that it serves, until `stop`."""

    def __init__(self, *services: str) -> None:
        self._services = services
        self._health = health_aio.HealthServicer()
        self._read = self._watching = 0

    def add_to(self, server: Server) -> None:
        """Adds the service."""
        methods = {"Check": _handler(self._check), "Watch": _handler(self._watch)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods),))

    async def start(self) -> None:
        """From now on they serve."""
        for name in self._services:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """From now on they serve no more; who watches is told."""
        await self._health.enter_graceful_shutdown()

    async def _check(self, _: AsyncIterator[bytes], context: ServicerContext) -> None:
        """While too much is being received, the answer is the whole server's, whatever is asked: what decides
        whether a gateway lives must not wait for strangers.
        """
        asked = health_pb2.HealthCheckRequest()
        if self._read < _MOST_READ:
            asked = await self._received(context)
        await context.write(await self._health.Check(asked, context))

    async def _watch(self, _: AsyncIterator[bytes], context: ServicerContext) -> None:
        if self._watching >= _MOST_WATCHING or self._read >= _MOST_READ:
            # As if there were no such method: then clients go on without watching.
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Too many watch already: use Check.")
        self._watching += 1
        try:
            await self._health.Watch(await self._received(context), context)
        finally:
            self._watching -= 1

    async def _received(self, context: ServicerContext) -> health_pb2.HealthCheckRequest:
        """Returns what a call asks. Aborts one that does not say it, or not soon."""
        self._read += 1
        try:
            async with LoopTimeout(_READ_S):
                return await one_message(context, health_pb2.HealthCheckRequest.FromString, _MOST_BYTES)
        except ApiError as error:
            await abort(context, failure_of_error(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"No message came within {_READ_S:.0f} s.")
            raise AssertionError("abort raises") from None
        finally:
            self._read -= 1


def _handler(handle: Handle) -> grpc.RpcMethodHandler:
    """The handler of a method whose messages come unparsed."""
    return grpc.stream_stream_rpc_method_handler(
        handle,  # pyright: ignore[reportArgumentType]
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
