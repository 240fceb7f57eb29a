"""What is asked over gRPC and over HTTP alike, and how errors are read."""

from __future__ import annotations

from typing import Any

from gateway.public_grpc.failures import DETAILS_KEY
from protos import loraplex_pb2 as pb

HI = [pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user", content="Hi 🙂")]
OPENAI_HI: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🙂"}]


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def error_of(call: Any) -> pb.Error:
    """The details of a status."""
    details = pb.Status.FromString(dict(call.trailing_metadata())[DETAILS_KEY])
    assert details.code == call.code().value[0] and details.message == call.details()
    error = pb.Error()
    assert details.details[0].Unpack(error)
    return error
