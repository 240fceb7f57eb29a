"""The port of the gRPC service for clients, with standard health and reflection."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from fastapi import FastAPI
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # pyright: ignore[reportAttributeAccessIssue]
from grpc_reflection.v1alpha import reflection

from gateway.auth import require
from gateway.bodies import MAX_BODY_BYTES
from gateway.inner_calls import InnerCalls
from gateway.public_grpc.key_first import KeyFirst
from gateway.public_grpc.service import InferenceService, request_of
from protos import loraplex_pb2 as pb
from protos.loraplex_pb2_grpc import add_InferenceServicer_to_server

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_STOP_S = 5.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.keepalive_time_ms", 30_000),
)


class CannotListen(OSError):
    """The address cannot be had; the message says so in one sentence."""


@asynccontextmanager
async def serving_grpc(app: FastAPI, calls: InnerCalls, *, host: str, port: int) -> AsyncIterator[int]:
    """Serves on a port while the block runs; yields the port, which matters for 0. Raises CannotListen.

    On leaving, calls have some seconds to end.
    """
    requirement = require("inference")
    key_first = KeyFirst(SERVICE, lambda metadata: requirement(request_of(app, metadata)))
    server = grpc.aio.server(options=_OPTIONS, interceptors=[key_first])
    status = health_aio.HealthServicer()
    add_InferenceServicer_to_server(InferenceService(app, calls), server)
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        taken = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError:
        taken = 0
    if not taken:
        raise CannotListen(f"The gRPC port {port} of {host} is taken, or the host is not here.")
    await server.start()
    for name in ("", SERVICE):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    logger.info("gRPC for clients listens on %s:%d", host, taken)
    try:
        yield taken
    finally:
        await status.enter_graceful_shutdown()
        await server.stop(_STOP_S)
