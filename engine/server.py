"""The listening server: the engine's service, standard health and reflection, on one port."""

from __future__ import annotations

import logging

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # pyright: ignore[reportAttributeAccessIssue]
from grpc_reflection.v1alpha import reflection

from engine.service import EngineService
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Engine"].full_name
STOP_GRACE_SECONDS = 0.5


class CannotListen(Exception):
    """The address cannot be had; the message says so in one sentence."""


class EngineServer:
    """The listening server: the engine's service, health and reflection on one port."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.keepalive_time_ms", 30_000),
                # Gateways ping idle links every 10 s; by default gRPC hangs up on the third such ping.
                ("grpc.http2.max_ping_strikes", 0),
            ]
        )
        self._health = health_aio.HealthServicer()
        pb_grpc.add_EngineServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, address: str) -> int:
        """Listens on ``host:port`` and returns the port (which matters for port 0).

        Raises:
            CannotListen: the address is taken, or not this machine's.
        """
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if not port:
            raise CannotListen(f"cannot listen on {address}: the port is taken, or the host is not here")
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return port

    async def drain(self, timeout_s: float) -> None:
        """Reports itself as not serving, and waits until the last request has ended or time is up."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        remaining = await self.service.drain(timeout_s)
        if remaining:
            logger.warning("%d sequences had not ended after %.0f s of draining", remaining, timeout_s)

    async def stop(self) -> None:
        """Ends all calls and closes the port."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(STOP_GRACE_SECONDS)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)
