"""Health checks of the stack's processes. Each answers
within a second, and with False for whatever is wrong."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2

_TIMEOUT_S = 1.0


async def valkey_answers(port: int) -> bool:
    """Whether a Redis or Valkey on 127.0.0.1 answers PING, which it does once its data is loaded."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
    return False


async def engine_serves(address: str) -> bool:
    """Whether the engine's gRPC health service says SERVING."""
    with suppress(grpc.aio.AioRpcError):
        async with grpc.aio.insecure_channel(address) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            answer = await check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
            return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False


async def gateway_ready(url: str) -> bool:
    """Whether the gateway at this base URL says that it can answer requests."""
    with suppress(httpx.HTTPError, httpx.InvalidURL):
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
            return (await client.get(f"{url}/ready")).status_code == 200
    return False
