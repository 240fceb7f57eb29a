"""What anybody may do who reaches the port, and what comes of messages that are none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.public_grpc import open_health
from protos import loraplex_pb2 as pb
from protos.loraplex_pb2_grpc import InferenceStub
from tests.gateway.local_stack import LocalStack, wait_until
from tests.gateway.public_grpc.asking import bearer, error_of

Health: Any = health_pb2
SERVING = Health.HealthCheckResponse.SERVING
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
GARBAGE = b"\xff\xff\xff\xff\x01"
BAD_UTF8 = b"\x0a\x02\xc3\x28"
"""A first field that would be a string."""


@pytest.fixture
def health(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


@pytest.fixture
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """gRPC may log no error meanwhile."""
    yield
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage() for record in errors if record.name.startswith("grpc")] == []


def test_wrong_keys_count_for_the_address_they_come_from(
    stack: LocalStack, stub: InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[str] = []

    async def penalise(address: str) -> None:
        addresses.append(address)

    monkeypatch.setattr(stack.app.state.services.authenticator._failures, "penalise", penalise)
    with pytest.raises(grpc.RpcError):
        stub.ListModels(pb.ListModelsRequest(), metadata=bearer("lpx_wrong"))
    assert addresses == ["127.0.0.1"]


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("message", [GARBAGE, BAD_UTF8], ids=["garbage", "no UTF-8"])
@pytest.mark.parametrize(
    "method",
    [
        "/loraplex.v1.Inference/Chat",
        "/loraplex.v1.Inference/ChatStream",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        CHECK,
        WATCH,
    ],
)
def test_a_message_that_does_not_parse_is_the_callers_fault(
    channel: grpc.Channel, key: str, method: str, message: bytes
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(channel.stream_stream(method)(iter([message]), metadata=bearer(key), timeout=60))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_of(refused.value)
    assert (error.code, error.http_status) == ("invalid_message", 400) and "cannot be parsed" in error.message
    metadata: Any = refused.value.trailing_metadata()
    assert dict(metadata)["x-request-id"].startswith("req_")


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("method", ["/loraplex.v1.Inference/Chat", CHECK])
def test_a_call_without_a_message_is_refused(channel: grpc.Channel, key: str, method: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(channel.stream_stream(method)(iter(()), metadata=bearer(key), timeout=60))
    assert error_of(refused.value).code == "invalid_message"


def test_what_reflection_and_health_are_asked_is_short(channel: grpc.Channel, health: Any, key: str) -> None:
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="y" * 5000)
    calls: list[Callable[[], object]] = [
        lambda: list(reflection.ServerReflectionInfo(iter([asked]), metadata=bearer(key))),
        lambda: health.Check(Health.HealthCheckRequest(service="y" * 2000)),
        lambda: list(health.Watch(Health.HealthCheckRequest(service="y" * 2000), timeout=60)),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert error_of(refused.value).code == "invalid_message"


def test_health_needs_no_key(health: Any) -> None:
    for service in ("", "loraplex.v1.Inference"):
        assert health.Check(Health.HealthCheckRequest(service=service)).status == SERVING
        watch = health.Watch(Health.HealthCheckRequest(service=service))
        assert next(watch).status == SERVING
        watch.cancel()
    with pytest.raises(grpc.RpcError) as refused:
        health.Check(Health.HealthCheckRequest(service="nothing"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(Health.HealthCheckRequest(service="nothing"))
    assert next(watch).status == Health.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def test_watches_are_bounded_and_clients_go_on_without(health: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_health, "_MOST_WATCHING", 2)

    def watch() -> Any:
        call = health.Watch(Health.HealthCheckRequest())
        return call if next(call).status == SERVING else None

    def is_refused() -> bool:
        try:
            watch().cancel()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
            return True
        return False

    wait_until(lambda: not is_refused(), "those of other tests have ended")
    watches = [watch(), watch()]
    assert is_refused()
    for call in watches:
        call.cancel()
    wait_until(lambda: not is_refused(), "there is room again")


def test_who_sends_no_message_keeps_nobody_from_health(
    channel: grpc.Channel, health: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_health, "_MOST_READ", 2)
    silence = threading.Event()

    def nothing() -> Iterator[bytes]:
        silence.wait()
        yield from ()

    silent = [channel.stream_stream(CHECK)(nothing(), timeout=60) for _ in range(2)]

    def answers() -> bool:
        """Whether a name that there is not gets the whole server's answer."""
        try:
            return health.Check(Health.HealthCheckRequest(service="nothing")).status == SERVING
        except grpc.RpcError:
            return False

    try:
        wait_until(answers, "the others are waited for")
        with pytest.raises(grpc.RpcError) as refused:
            list(health.Watch(Health.HealthCheckRequest(), timeout=60))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        for call in silent:
            with pytest.raises(grpc.RpcError) as late:
                list(call)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        silence.set()
    wait_until(lambda: not answers(), "names count again")
    assert health.Check(Health.HealthCheckRequest()).status == SERVING


def test_strangers_messages_are_not_received(channel: grpc.Channel) -> None:
    """Neither the service's nor reflection's: there the key comes first."""
    for method in (
        "/loraplex.v1.Inference/Chat",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ):
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(method)(iter([GARBAGE])))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
