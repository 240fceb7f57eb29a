"""The gRPC service for clients, with grpcio's client, against what the openai package gets over HTTP."""

from __future__ import annotations

import math
import time
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from openai import OpenAI
from redis.asyncio import Redis

from gateway.bodies import MAX_BODY_BYTES
from gateway.public_grpc import service
from gateway.public_grpc.failures import DETAILS_KEY
from gateway.tenants import Tenants
from protos import loraplex_pb2 as pb
from protos.engine_pb2 import LinkResponse
from protos.loraplex_pb2_grpc import InferenceStub
from tests.gateway.fake_engine import MODEL
from tests.gateway.local_stack import LocalStack, wait_until
from tests.gateway.public_grpc.asking import HI, OPENAI_HI, bearer, error_of


class WithKey(grpc.StreamStreamClientInterceptor):
    """Adds the key to calls of what takes no metadata."""

    def __init__(self, key: str) -> None:
        self._key = key

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        """See grpc."""
        return continuation(client_call_details._replace(metadata=bearer(self._key)), request_iterator)


FOREVER: dict[str, Any] = {"ignore_eos": True}


@pytest.mark.parametrize("model", [MODEL, "sql"])
def test_chat_is_what_openais_client_gets(stub: InferenceStub, client: OpenAI, key: str, model: str) -> None:
    options = pb.GenerationOptions(n=2, max_tokens=30, seed=2**62, temperature=0.7, top_k=-1, ignore_eos=True)
    asked = pb.ChatRequest(model=model, messages=HI, options=options, logprobs=True, top_logprobs=2)
    answer, call = stub.Chat.with_call(asked, metadata=bearer(key))
    own = client.chat.completions.create(
        model=model, messages=OPENAI_HI, n=2, max_tokens=30, seed=2**62, temperature=0.7,
        logprobs=True, top_logprobs=2, extra_body=FOREVER,
    )  # fmt: skip
    assert answer.model == own.model and answer.system_fingerprint == own.system_fingerprint
    for choice, other in zip(answer.choices, own.choices, strict=True):
        assert (choice.index, choice.message.content) == (other.index, other.message.content)
        assert (choice.finish_reason, choice.message.role) == (other.finish_reason, other.message.role)
        assert other.logprobs is not None and other.logprobs.content is not None
        for token, expected in zip(choice.logprobs.content, other.logprobs.content, strict=True):
            assert (token.token, token.logprob, list(token.bytes)) == (
                expected.token,
                expected.logprob,
                expected.bytes,
            )
            assert [top.token for top in token.top_logprobs] == [top.token for top in expected.top_logprobs]
    assert own.usage is not None and answer.usage.completion_tokens == own.usage.completion_tokens == 60
    metadata = dict(call.trailing_metadata())
    assert metadata["x-request-id"].startswith("req_")


def test_a_streamed_chat_adds_up(stub: InferenceStub, key: str) -> None:
    options = pb.GenerationOptions(max_tokens=40, seed=5, ignore_eos=True)
    asked = pb.ChatRequest(model="sql", messages=HI, options=options)
    whole = stub.Chat(asked, metadata=bearer(key))
    chunks = list(stub.ChatStream(asked, metadata=bearer(key)))
    text = "".join(choice.delta.content for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content and len(chunks) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "length"
    ]
    assert chunks[-1].usage == whole.usage and whole.usage.completion_tokens == 40


def test_completions_of_texts_and_tokens(stub: InferenceStub, client: OpenAI, key: str) -> None:
    options = pb.GenerationOptions(max_tokens=20, seed=3, logit_bias={70: -5.0}, stop=["w7"])
    prompts = [pb.Prompt(tokens=pb.TokenIds(ids=[1, 2, 3])), pb.Prompt(tokens=pb.TokenIds(ids=[4]))]
    asked = pb.CompleteRequest(model=MODEL, prompts=prompts, options=options, logprobs=1)
    answer = stub.Complete(asked, metadata=bearer(key))
    own = client.completions.create(
        model=MODEL, prompt=[[1, 2, 3], [4]], max_tokens=20, seed=3, logprobs=1, stop=["w7"],
        logit_bias={"70": -5},
    )  # fmt: skip
    for choice, other in zip(answer.choices, own.choices, strict=True):
        assert (choice.text, choice.finish_reason) == (other.text, other.finish_reason)
        assert other.logprobs is not None and list(choice.logprobs.tokens) == other.logprobs.tokens
        assert list(choice.logprobs.text_offset) == other.logprobs.text_offset
        assert [dict(top.logprobs) for top in choice.logprobs.top_logprobs] == other.logprobs.top_logprobs
    texts = {0: "", 1: ""}
    for chunk in stub.CompleteStream(asked, metadata=bearer(key)):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in own.choices]


def test_an_echoed_prompts_first_token_has_no_logprob(stub: InferenceStub, key: str) -> None:
    asked = pb.CompleteRequest(
        model=MODEL, prompts=[pb.Prompt(text="abc")], echo=True, logprobs=1,
        options=pb.GenerationOptions(max_tokens=2),
    )  # fmt: skip
    (choice,) = stub.Complete(asked, metadata=bearer(key)).choices
    first, *rest = choice.logprobs.token_logprobs
    assert math.isnan(first) and rest and not any(map(math.isnan, rest)) and choice.text.startswith("abc")


def test_vectors_and_models(stub: InferenceStub, client: OpenAI, key: str) -> None:
    answer = stub.Embed(
        pb.EmbedRequest(model="sql", inputs=[pb.Prompt(text="one"), pb.Prompt(text="two")], dimensions=4),
        metadata=bearer(key),
    )
    own = client.embeddings.create(model="sql", input=["one", "two"], dimensions=4)
    assert [list(each.values) for each in answer.embeddings] == [each.embedding for each in own.data]
    assert (answer.model, answer.usage.prompt_tokens) == (own.model, own.usage.prompt_tokens)
    listed = stub.ListModels(pb.ListModelsRequest(), metadata=bearer(key)).models
    assert [(each.id, each.owned_by) for each in listed] == [
        (each.id, each.owned_by) for each in client.models.list()
    ]


@pytest.mark.parametrize(
    ("request_", "code", "param", "word"),
    [
        (pb.ChatRequest(model="none", messages=HI), grpc.StatusCode.NOT_FOUND, "model", "model_not_found"),
        (pb.ChatRequest(model=MODEL), grpc.StatusCode.INVALID_ARGUMENT, "messages", ""),
        (
            pb.ChatRequest(model=MODEL, messages=HI, options=pb.GenerationOptions(temperature=9)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
            "invalid_value",
        ),
        (pb.ChatRequest(model="broken", messages=HI), grpc.StatusCode.INTERNAL, "", "generation_failed"),
    ],
)
def test_errors_are_statuses_with_details(
    stub: InferenceStub, key: str, request_: pb.ChatRequest, code: grpc.StatusCode, param: str, word: str
) -> None:
    for ask in (stub.Chat, lambda *args, **more: list(stub.ChatStream(*args, **more))):
        with pytest.raises(grpc.RpcError) as refused:
            ask(request_, metadata=bearer(key))
        assert refused.value.code() is code
        error = error_of(refused.value)
        assert error.param == param and (not word or error.code == word) and error.message


def test_keys_are_those_of_http(stack: LocalStack, stub: InferenceStub, key: str) -> None:
    asked = pb.ChatRequest(model=MODEL, messages=HI, options=pb.GenerationOptions(max_tokens=1))
    for metadata in ((), bearer("lpx_wrong"), bearer(key + "x")):
        for ask in (stub.Chat, stub.ListModels):
            with pytest.raises(grpc.RpcError) as refused:
                ask(asked if ask is stub.Chat else pb.ListModelsRequest(), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert error_of(refused.value).code == "invalid_api_key"
    other = stack.add_tenant("globex")
    with pytest.raises(grpc.RpcError) as missing:
        stub.Chat(pb.ChatRequest(model="sql", messages=HI), metadata=bearer(other))
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_stranger_is_refused_before_the_message_is_read(stack: LocalStack) -> None:
    options = (("grpc.max_send_message_length", -1),)
    with grpc.insecure_channel(stack.grpc_address, options=options) as channel:
        ask = channel.unary_unary("/loraplex.v1.Inference/Chat")
        with pytest.raises(grpc.RpcError) as refused:
            ask(b"no message of the service", metadata=bearer("lpx_wrong"))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_message_that_is_too_large_is_no_limit_of_the_tenants(stub: InferenceStub, key: str) -> None:
    """Both are RESOURCE_EXHAUSTED, which waiting cures for one of them only."""
    asked = pb.CompleteRequest(model=MODEL, prompts=[pb.Prompt(text="a" * MAX_BODY_BYTES)])
    with pytest.raises(grpc.RpcError) as refused:
        stub.Complete(asked, metadata=bearer(key))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata: Any = refused.value.trailing_metadata()
    assert DETAILS_KEY not in dict(metadata)


def limit(stack: LocalStack, tenant: str, **limits: int) -> None:
    async def update() -> None:
        async with Redis.from_url(stack.redis_url) as redis:
            await Tenants(redis).update(tenant, {"limits": limits})

    stack.call(update())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_what_is_left_of_limits_goes_with_an_answer(
    stack: LocalStack, stub: InferenceStub, streams: bool
) -> None:
    tenant = f"bounded-{streams}".lower()
    key = stack.add_tenant(tenant)
    limit(stack, tenant, requests_per_minute=5)
    options = pb.GenerationOptions(max_tokens=3, ignore_eos=True)
    asked = pb.CompleteRequest(model=MODEL, prompts=[pb.Prompt(text="a")], options=options)
    if streams:
        call: Any = stub.CompleteStream(asked, metadata=bearer(key))
        assert len(list(call)) > 1
    else:
        _, call = stub.Complete.with_call(asked, metadata=bearer(key))
    metadata = dict(call.trailing_metadata())
    assert metadata["x-request-id"].startswith("req_")
    assert metadata["x-ratelimit-limit-requests"] == "5"
    assert metadata["x-ratelimit-remaining-requests"] == "4"


def test_limits_and_the_ledger_are_those_of_http(stack: LocalStack, stub: InferenceStub) -> None:
    key = stack.add_tenant("limited")
    limit(stack, "limited", requests_per_minute=2)
    asked = pb.ChatRequest(model=MODEL, messages=HI, options=pb.GenerationOptions(max_tokens=1))
    _, call = stub.Chat.with_call(asked, metadata=bearer(key))
    assert dict(call.trailing_metadata())["x-ratelimit-limit-requests"] == "2"
    with stack.client(key) as client:
        client.chat.completions.create(model=MODEL, messages=OPENAI_HI, max_tokens=1)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Chat(asked, metadata=bearer(key))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < error_of(refused.value).retry_after_s <= 60

        def routes() -> list[str]:
            usage: Any = client.get("/usage/requests", cast_to=object)
            return [each["route"] for each in usage["data"]]

        wait_until(lambda: routes() == ["chat", "chat"], "both are in the ledger")


def test_a_deadline_and_a_cancel_end_the_request(
    stack: LocalStack, stub: InferenceStub, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stack.engines[0]
    monkeypatch.setattr(engine, "holds_at", 5)
    options = pb.GenerationOptions(max_tokens=2000, ignore_eos=True)
    asked = pb.ChatRequest(model=MODEL, messages=HI, options=options)
    with pytest.raises(grpc.RpcError) as late:
        stub.Chat(asked, metadata=bearer(key), timeout=0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: not engine.running, "it has ended")
    stream = stub.ChatStream(asked, metadata=bearer(key))
    next(stream)
    stream.cancel()
    wait_until(lambda: not engine.running, "it has ended")
    future = stub.Chat.future(asked, metadata=bearer(key), timeout=100)
    wait_until(lambda: bool(engine.running), "it runs")
    assert 0 < engine.submits[-1].deadline_ms <= 110_000, "what gRPC makes of 100 s"
    future.cancel()
    wait_until(lambda: not engine.running, "it has ended")


@pytest.mark.parametrize("silent", [False, True], ids=["told", "cut off"])
def test_a_request_at_its_deadline_is_booked_as_such(
    stack: LocalStack, stub: InferenceStub, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """Also where the engine is late with it, and gRPC ends the call first."""
    monkeypatch.setattr(service, "_MARGIN", 0.5)
    monkeypatch.setattr(service, "_MARGIN_S", 60.0)
    key, engine = stack.add_tenant(f"late-{silent}".lower()), stack.engines[0]
    monkeypatch.setattr(engine, "holds_at", 5)
    if silent:
        monkeypatch.setattr(engine, "rests_after", 0)
    options = pb.GenerationOptions(max_tokens=2000, ignore_eos=True)
    with pytest.raises(grpc.RpcError) as late:
        stub.Chat(pb.ChatRequest(model=MODEL, messages=HI, options=options), metadata=bearer(key), timeout=3)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    if not silent:
        assert error_of(late.value).code == "deadline_exceeded"
    with stack.client(key) as client:

        def outcomes() -> list[str]:
            usage: Any = client.get("/usage/requests", cast_to=object)
            return [each["outcome"] for each in usage["data"]]

        wait_until(lambda: outcomes() == ["deadline"], "it is in the ledger")


def test_a_client_that_leaves_before_its_stream_begins_has_gone(
    stack: LocalStack, stub: InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, engine = stack.add_tenant("hasty"), stack.engines[0]
    monkeypatch.setattr(engine, "_admit", lambda submit, choices: LinkResponse())
    before = len(engine.submits)
    stream = stub.ChatStream(pb.ChatRequest(model=MODEL, messages=HI), metadata=bearer(key))
    wait_until(lambda: len(engine.submits) > before, "the engine has it, and has not begun")
    stream.cancel()
    with stack.client(key) as client:

        def outcomes() -> list[str]:
            usage: Any = client.get("/usage/requests", cast_to=object)
            return [each["outcome"] for each in usage["data"]]

        wait_until(lambda: bool(outcomes()), "it is in the ledger")
        assert outcomes() == ["disconnected"]


def test_an_error_in_the_middle_of_a_stream_is_a_status(
    stack: LocalStack, stub: InferenceStub, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stack.engines[0]
    monkeypatch.setattr(engine, "holds_at", 5)
    options = pb.GenerationOptions(max_tokens=2000, ignore_eos=True)
    stream = stub.ChatStream(
        pb.ChatRequest(model=MODEL, messages=HI, options=options), metadata=bearer(key), timeout=0.5
    )
    with pytest.raises(grpc.RpcError) as ended:
        for _ in stream:
            time.sleep(0.001)
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: not engine.running, "it has ended")


def test_reflection_wants_a_key(channel: grpc.Channel, key: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        ProtoReflectionDescriptorDatabase(channel).get_services()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "-H 'authorization: Bearer lpx_...'" in error_of(refused.value).message
    database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, WithKey(key)))
    assert "loraplex.v1.Inference" in database.get_services()
    service = DescriptorPool(database).FindServiceByName("loraplex.v1.Inference")
    assert {method.name for method in service.methods} == {
        "Chat", "ChatStream", "Complete", "CompleteStream", "Embed", "ListModels",
    }  # fmt: skip


def test_http_is_as_before(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.get("/grpc", cast_to=object)
