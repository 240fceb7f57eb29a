"""Embeddings, batches and gRPC on a whole stack: with adapters, beside other work, and through a kill -9."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import redis
import torch
from openai import OpenAI

from protos import loraplex_pb2 as pb
from protos.loraplex_pb2_grpc import InferenceStub
from tests.e2e.processes import FOREVER, Stack, wait_until
from tests.e2e.tiny import TINY, TinyZoo, upload, words

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ADAPTERS = ("service-a", "service-b")
ENDPOINT: Any = "/v1/completions"


@dataclass(frozen=True)
class Scene:
    stack: Stack
    zoo: TinyZoo
    key: str
    client: OpenAI


@pytest.fixture(scope="module")
def scene(tiny_stack: Stack, zoo: TinyZoo) -> Iterator[Scene]:
    key = tiny_stack.create_tenant("services")
    for seed, name in enumerate(ADAPTERS, start=80):
        upload(tiny_stack, key, name, zoo.add(name, seed=seed))
    with tiny_stack.client(key) as client:
        yield Scene(tiny_stack, zoo, key, client)


def test_vectors_are_those_of_peft_while_others_generate(scene: Scene) -> None:
    stop = threading.Event()

    def generate() -> None:
        with scene.stack.client(scene.key) as client:
            while not stop.is_set():
                client.completions.create(
                    model=ADAPTERS[0], prompt=words(50, 1), max_tokens=40, n=4, extra_body=FOREVER
                )

    generating = threading.Thread(target=generate)
    generating.start()
    try:
        for adapter in (None, *ADAPTERS):
            prompts = [words(length, length) for length in (1, 17, 400, 700)]
            answer = scene.client.embeddings.create(model=adapter or TINY, input=prompts)
            for each, prompt in zip(answer.data, prompts, strict=True):
                own = scene.zoo.vector(adapter, prompt)
                assert torch.tensor(each.embedding) @ own >= 0.99999, (adapter, len(prompt))
            assert answer.usage.prompt_tokens == sum(map(len, prompts))
    finally:
        stop.set()
        generating.join()


def test_a_batch_goes_on_after_its_gateway_is_killed(scene: Scene) -> None:
    count = 120
    lines = [
        {
            "custom_id": f"r{index}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {
                "model": (TINY, *ADAPTERS)[index % 3],
                "prompt": words(20, index),
                "max_tokens": 10 + index,  # so that they end one after the other
                "temperature": 0,
                **FOREVER,
            },
        }
        for index in range(count)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = scene.client.files.create(file=("in.jsonl", content), purpose="batch")
    for _ in range(10):
        batch = scene.client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        if killed_half_way(scene, f"loraplex:{{services}}:batch:{batch.id}:done", count):
            break
    else:
        raise AssertionError("batches end before their gateway can be killed")
    wait_until(
        lambda: scene.client.batches.retrieve(batch.id).status == "completed", "the batch is done", 180
    )
    ended = scene.client.batches.retrieve(batch.id)
    assert ended.output_file_id is not None and ended.error_file_id is None
    answers = [
        json.loads(text) for text in scene.client.files.content(ended.output_file_id).text.splitlines()
    ]
    assert Counter(answer["custom_id"] for answer in answers) == Counter(f"r{i}" for i in range(count))
    texts = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers}
    for index in (0, 1, 2, count - 1):
        adapter = (None, *ADAPTERS)[index % 3]
        assert texts[f"r{index}"] == scene.zoo.expected(adapter, words(20, index), 10 + index)[0]


def killed_half_way(scene: Scene, done: str, count: int) -> bool:
    """Kills the gateway once some lines are done, and starts it again. Returns whether not all were."""
    with redis.Redis.from_url(scene.stack.redis_url) as records:
        wait_until(lambda: records.bitcount(done) >= 10, "some lines are done")
        scene.stack.gateway.kill()
        is_half_way = records.bitcount(done) < count
    scene.stack.gateway.start()
    return is_half_way


def test_an_answer_over_grpc_is_the_one_over_http(scene: Scene) -> None:
    listening = scene.stack.gateway.lines("gRPC for clients listens on")[-1]
    messages = [pb.ChatMessage(role="user", content="Tell me more 🙂")]
    options = pb.GenerationOptions(max_tokens=40, seed=11, temperature=0.8)
    with grpc.insecure_channel(listening.rpartition(" ")[2]) as channel:
        stub = InferenceStub(channel)
        for model in (TINY, *ADAPTERS):
            asked = pb.ChatRequest(model=model, messages=messages, options=options)
            metadata = (("authorization", f"Bearer {scene.key}"),)
            whole = stub.Chat(asked, metadata=metadata)
            chunks = list(stub.ChatStream(asked, metadata=metadata))
            own = scene.client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Tell me more 🙂"}],
                max_tokens=40,
                seed=11,
                temperature=0.8,
            )
            assert whole.choices[0].message.content == own.choices[0].message.content
            assert "".join(choice.delta.content for chunk in chunks for choice in chunk.choices) == (
                own.choices[0].message.content
            )
            assert own.usage is not None
            assert chunks[-1].usage.completion_tokens == own.usage.completion_tokens
