"""The port of the gRPC service for clients, with standard health and reflection."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
from fastapi import FastAPI
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from gateway.bodies import MAX_BODY_BYTES
from gateway.inner_calls import InnerCalls
from gateway.public_grpc.key_first import KeyFirst
from gateway.public_grpc.open_health import OpenHealth
from gateway.public_grpc.service import InferenceService, admit
from protos import loraplex_pb2 as pb
from protos.loraplex_pb2_grpc import add_InferenceServicer_to_server

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_MOST_BYTES = {SERVICE: MAX_BODY_BYTES, reflection.SERVICE_NAME: 4096}
"""The services that want a key, and how large their messages may be."""
_STOP_S = 5.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.max_concurrent_streams", 1000),  # of a connection; more wait at the client
    ("grpc.keepalive_time_ms", 30_000),
)


class CannotListen(OSError):
    """The address cannot be had; the message says so in one sentence."""


@asynccontextmanager
async def serving_grpc(app: FastAPI, calls: InnerCalls, *, host: str, port: int) -> AsyncIterator[int]:
    """Serves on a port while the block runs; yields the port, which matters for 0. Raises CannotListen.

    On leaving, calls have some seconds to end.
    """
    key_first = KeyFirst(partial(admit, app), _MOST_BYTES)
    server = grpc.aio.server(options=_OPTIONS, interceptors=[key_first])
    status = OpenHealth("", SERVICE)
    add_InferenceServicer_to_server(InferenceService(app, calls), server)
    status.add_to(server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        taken = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError:
        taken = 0
    if not taken:
        raise CannotListen(f"The gRPC port {port} of {host} is taken, or the host is not here.")
    await server.start()
    await status.start()
    logger.info("gRPC for clients listens on %s:%d", host, taken)
    try:
        yield taken
    finally:
        await status.stop()
        await server.stop(_STOP_S)
