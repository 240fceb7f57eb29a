"""A stack whose adapters lie in a bucket: engines answer from it, and without it, and forget what is gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Stack, adapters_command, wait_until
from tests.e2e.tiny import FLAGS, TinyZoo, ask, words
from tests.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.e2e

LOCATION = f"s3://{BUCKET}/e2e"


@pytest.fixture
def stack(zoo: TinyZoo, s3: S3Server, tmp_path: Path) -> Iterator[Stack]:
    """A tiny stack with the bucket in the place of its folder."""
    caches = {
        "LORAPLEX_STORE_CACHE": str(tmp_path / "gateway"),
        "LORAPLEX_ENGINE_STORE_CACHE": str(tmp_path / "engine"),
    }
    stack = Stack(tmp_path, FLAGS, model=zoo.folder / "model", **s3.variables, **caches)
    for service in (stack.engine, stack.gateway):
        argv = [LOCATION if word == str(stack.store) else word for word in service.spec.argv]
        service.spec = dataclasses.replace(service.spec, argv=argv)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


def asked(stack: Stack, key: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "w1", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=120)


def copies(tmp_path: Path) -> list[str]:
    """The digests on the engine's disk."""
    return sorted(path.name for path in (tmp_path / "engine" / "blobs").iterdir())


def test_an_engine_serves_from_a_bucket_and_its_disk(
    stack: Stack, zoo: TinyZoo, s3: S3Server, tmp_path: Path
) -> None:
    folder = zoo.add("bucket", seed=71)
    key = stack.create_tenant("acme")
    stack.upload(folder, "sql", key)
    stack.upload(zoo.add("bucket-2", seed=72), "kept", key)
    prompt = words(20, seed=71)
    text, _ = zoo.expected("bucket", prompt, 8)
    answer = ask(stack, key, "sql", prompt, 8)
    assert (answer.text, answer.model) == (text, "sql@1")
    (copy,) = copies(tmp_path)

    s3.is_away = True
    stack.engine.kill()
    stack.engine.start()
    wait_until(lambda: httpx.get(f"{stack.url}/ready").status_code == 200, "the engine is found again")
    assert ask(stack, key, "sql", prompt, 8).text == text
    cold = asked(stack, key, "kept")
    assert (cold.status_code, cold.json()["error"]["code"]) == (503, "store_unavailable")
    assert int(cold.headers["retry-after"]) > 0
    s3.is_away = False
    assert asked(stack, key, "kept").status_code == 200

    again = adapters_command("upload", str(folder), "--name", "other", url=stack.url, key=key)
    assert again.returncode == 0, again.stderr
    assert ask(stack, key, "other", prompt, 8).model == "other@1"
    headers = {"Authorization": f"Bearer {key}"}
    stack.engine.kill()  # what is deleted while it is away, it learns when it is back
    for name in ("sql", "other"):
        httpx.delete(f"{stack.url}/v1/adapters/{name}", headers=headers).raise_for_status()
    assert copy in copies(tmp_path)
    stack.engine.start()
    wait_until(lambda: copy not in copies(tmp_path), "the engine's copy is gone")
