"""`POST /v1/embeddings` with the openai package, on a gateway before a fake engine."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from protos.engine_pb2 import POOLING_MEAN, Submit
from tests.gateway.fake_engine import (
    FAILING_DIGEST,
    HIDDEN_SIZE,
    MODEL,
    VOCAB_SIZE,
    make_tokenizer,
    prompt_vector,
)
from tests.gateway.local_stack import LocalStack, wait_until

DIGEST = b"\x05" * 32


@pytest.fixture(scope="module")
def key(module_stack: LocalStack) -> str:
    key = module_stack.add_tenant("vectors")
    module_stack.add_adapter("vectors", "sql", DIGEST)
    module_stack.add_adapter("vectors", "broken", FAILING_DIGEST)
    return key


@pytest.fixture
def client(module_stack: LocalStack, key: str) -> Iterator[OpenAI]:
    with module_stack.client(key) as client:
        yield client


def expected(tokens: Sequence[int], digest: bytes = b"", dimensions: int = HIDDEN_SIZE) -> list[float]:
    submit = Submit(prompt_tokens=tokens, adapter_digest=digest, pooling=POOLING_MEAN)
    vector = struct.unpack(f"<{HIDDEN_SIZE}f", prompt_vector(submit))[:dimensions]
    length = math.hypot(*vector)
    return [number / length for number in vector]


def tokens_of(text: str) -> list[int]:
    return make_tokenizer().encode(text).ids


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("one text", [tokens_of("one text")]),
        (["one", "two"], [tokens_of("one"), tokens_of("two")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
@pytest.mark.parametrize(("model", "digest"), [(MODEL, b""), ("sql", DIGEST)])
def test_a_vector_for_each_input(
    client: OpenAI, given: Any, prompts: list[list[int]], model: str, digest: bytes
) -> None:
    answer = client.embeddings.create(model=model, input=given)
    assert answer.model == (MODEL if model == MODEL else "sql@1") and answer.object == "list"
    assert [(each.index, each.object) for each in answer.data] == [
        (i, "embedding") for i in range(len(prompts))
    ]
    for each, prompt in zip(answer.data, prompts, strict=True):
        assert each.embedding == pytest.approx(expected(prompt, digest), abs=1e-6)
        assert math.hypot(*each.embedding) == pytest.approx(1, abs=1e-6)
    total = sum(map(len, prompts))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)


def test_both_encodings_and_fewer_dimensions(module_stack: LocalStack, key: str) -> None:
    url, headers = f"{module_stack.url}/v1/embeddings", {"authorization": f"Bearer {key}"}
    body: dict[str, Any] = {"model": "sql", "input": [7, 8], "dimensions": 3}
    floats = httpx.post(url, json=body, headers=headers).json()["data"][0]["embedding"]
    assert floats == pytest.approx(expected([7, 8], DIGEST, dimensions=3), abs=1e-6)
    packed = httpx.post(url, json=body | {"encoding_format": "base64"}, headers=headers)
    assert struct.unpack("<3f", base64.b64decode(packed.json()["data"][0]["embedding"])) == pytest.approx(
        floats, abs=1e-7
    )


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": []}, "input", ""),
        ({"input": [[]]}, "input", ""),
        ({"input": [VOCAB_SIZE]}, "input", "vocabulary"),
        ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions", str(HIDDEN_SIZE)),
        ({"input": "a", "dimensions": 0}, "dimensions", ""),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": [1] * 256}, "input", "256"),
        ({"input": "a", "stream": True}, "stream", ""),
    ],
)
def test_what_can_have_no_vector_is_refused(client: OpenAI, body: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/embeddings", body={"model": MODEL, **body}, cast_to=object)
    assert refused.value.param == param or (refused.value.param or "").startswith(param)
    assert words in str(refused.value)


def test_an_unknown_model_and_a_failing_one(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="none", input="a")
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.embeddings.create(model="broken", input="a")


def test_the_ledger_has_it(client: OpenAI) -> None:
    client.embeddings.create(model="sql", input=[[1, 2, 3], [4, 5]])

    def latest() -> tuple[Any, ...]:
        usage: Any = client.get("/usage/requests", cast_to=object)
        names = ("route", "adapter", "input_tokens", "output_tokens", "outcome")
        return tuple(usage["data"][0][name] for name in names)

    wait_until(lambda: latest() == ("embeddings", "sql", 5, 0, "completed"), "it is in the ledger")
