"""Batches for tests, and what came of them."""

from __future__ import annotations

import json
import time
from typing import Any

from openai import OpenAI

from gateway.batches.batch import Batch
from tests.gateway.fake_engine import MODEL
from tests.gateway.local_stack import wait_until


def lines(count: int, **body: Any) -> bytes:
    made = [
        {
            "custom_id": f"r{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": f"r{index}", "max_tokens": 4, "ignore_eos": True, **body},
        }
        for index in range(count)
    ]
    return "".join(json.dumps(each) + "\n" for each in made).encode()


def a_batch(batch_id: str, file_id: str, tenant: str = "acme") -> Batch:
    now = int(time.time())
    return Batch(tenant, batch_id, "key", "/v1/completions", file_id, "1h", now, now + 3600)


def begin(client: OpenAI, content: bytes) -> str:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="1h",  # type: ignore[arg-type]
    ).id


def wait_for(client: OpenAI, batch_id: str, *statuses: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch_id).status in statuses, f"it is {statuses}")
    return client.batches.retrieve(batch_id)


def custom_ids(client: OpenAI, *file_ids: str | None) -> list[str]:
    texts = [client.files.content(file_id).text for file_id in file_ids if file_id]
    return [json.loads(text)["custom_id"] for part in texts for text in part.splitlines()]
