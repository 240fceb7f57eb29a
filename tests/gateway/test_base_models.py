"""A tenant uses the base models that it may, and learns nothing of others."""

from __future__ import annotations

from typing import Any

import httpx

from tests.gateway.fake_engine import MODEL
from tests.gateway.local_stack import LocalStack, wait_until

DIGEST = b"\x07" * 32


def refused(stack: LocalStack, key: str, model: str) -> tuple[int, Any]:
    """Status and error of a completion."""
    body = {"model": model, "prompt": "hello", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers)
    return answer.status_code, answer.json().get("error")


def listed(stack: LocalStack, key: str) -> list[str]:
    """What the tenant may name as `model`."""
    answer = httpx.get(f"{stack.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    return [model["id"] for model in answer.json()["data"]]


def test_a_base_model_that_is_not_allowed_is_as_if_it_were_not_there(local_stack: LocalStack) -> None:
    key, free = local_stack.add_tenant("acme"), local_stack.add_tenant("other")
    for tenant in ("acme", "other"):
        local_stack.add_adapter(tenant, "sql", DIGEST)
    assert refused(local_stack, key, MODEL)[0] == 200
    tenants = local_stack.app.state.services.tenants
    local_stack.call(tenants.update("acme", {"base_models": ["another"]}))
    wait_until(lambda: refused(local_stack, key, MODEL)[0] == 404, "the gateway follows")
    _, there = refused(local_stack, key, MODEL)
    _, absent = refused(local_stack, key, "nope")
    assert {**there, "message": ""} == {**absent, "message": ""}
    assert there["message"] == absent["message"].replace("nope", MODEL)
    status, above = refused(local_stack, key, "sql")
    assert (status, above["code"]) == (403, "base_model_not_allowed") and MODEL not in above["message"]
    assert refused(local_stack, key, "other/sql")[0] == 404
    assert listed(local_stack, key) == []
    assert listed(local_stack, free) == [MODEL, "sql"]
    for name, code in ((MODEL, 404), ("sql", 403), ("nope", 404)):
        url, headers = f"{local_stack.url}/v1/models/{name}", {"Authorization": f"Bearer {key}"}
        assert httpx.get(url, headers=headers).status_code == code
    local_stack.call(tenants.update("acme", {"base_models": ["another", MODEL]}))
    wait_until(lambda: refused(local_stack, key, "sql")[0] == 200, "it may use it again")
    assert refused(local_stack, free, MODEL)[0] == 200
