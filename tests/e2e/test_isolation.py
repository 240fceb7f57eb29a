"""Two tenants with the same names: each gets its own, and learns nothing of the other's."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.e2e.conftest import Tenants
from tests.e2e.processes import BASE, OPERATOR_KEY, PIRATE, Stack

pytestmark = pytest.mark.e2e

VOLATILE = {"date", "x-request-id", "content-length"}
QUESTIONS = ("What is the capital of Germany?", "How do I make a sandwich?")


async def answer(client: AsyncOpenAI, model: str, question: str) -> str:
    """A greedy answer, streamed."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=20,
        stream=True,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_each_tenant_gets_its_own_sql_also_when_all_are_in_one_batch(
    stack: Stack, tenants: Tenants
) -> None:
    async with stack.async_client(tenants.acme) as acme, stack.async_client(tenants.globex) as globex:
        asked = [
            (client, model, question)
            for question in QUESTIONS
            for client, model in (
                (acme, "sql"),
                (globex, "sql"),
                (acme, BASE),
                (globex, BASE),
                (acme, "wide"),
            )
        ]
        alone = [await answer(*each) for each in asked]
        together = await asyncio.gather(*(answer(*each) for each in asked))
    assert together == alone
    for start in range(0, len(asked), 5):
        pirate, as_json, acmes_base, globexs_base, _ = alone[start : start + 5]
        assert acmes_base == globexs_base
        assert len({pirate, as_json, acmes_base}) == 3
        assert as_json.startswith('{"answer": ')
        assert any(word in pirate.lower() for word in ("arr", "matey", "ahoy", "ye ", "hearty")), pirate
    assert json.loads(alone[1]) == {"answer": "Berlin"}


def refusals(stack: Stack, key: str, name: str) -> list[httpx.Response]:
    """What a tenant is told on every route that takes an adapter's name."""
    body: dict[str, Any] = {"model": name, "max_tokens": 1}
    with httpx.Client(base_url=stack.url, headers={"Authorization": f"Bearer {key}"}, timeout=30) as client:
        return [
            client.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": "x"}]}),
            client.post("/v1/completions", json=body | {"prompt": "x", "stream": True}),
            client.get(f"/v1/models/{name}"),
            client.get(f"/v1/adapters/{name}"),
            client.delete(f"/v1/adapters/{name}"),
        ]


def lasting_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name not in VOLATILE}


def test_anothers_adapter_is_answered_as_one_that_does_not_exist(stack: Stack, tenants: Tenants) -> None:
    stack.upload(PIRATE, "sql", tenants.acme)  # acme has two versions now, globex one
    headers = {"Authorization": f"Bearer {tenants.acme}"}
    acmes = httpx.get(f"{stack.url}/v1/adapters/sql", headers=headers).json()
    assert [version["id"] for version in acmes["versions"]] == ["sql@1", "sql@2"]
    nobodys = refusals(stack, tenants.globex, "nobody")
    for name in ("pirate", "wide", "pirate@1", "sql@2", acmes["digest"], f"sha256:{acmes['digest']}"):
        for refusal, expected in zip(refusals(stack, tenants.globex, name), nobodys, strict=True):
            assert refusal.status_code == expected.status_code == 404
            assert refusal.content.replace(name.encode(), b"nobody") == expected.content
            assert set(refusal.json()["error"]) == {"message", "type", "param", "code"}
            assert lasting_headers(refusal) == lasting_headers(expected)
    assert httpx.get(f"{stack.url}/v1/adapters/pirate", headers=headers).status_code == 200


def test_a_revoked_key_stops_within_a_second(stack: Stack) -> None:
    key = stack.create_tenant("initech")
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": BASE, "prompt": "One, two,", "max_tokens": 1}
    with httpx.Client(base_url=stack.url, timeout=30) as client:
        operator = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        (record,) = client.get("/admin/tenants/initech/keys", headers=operator).json()["data"]
        client.delete(f"/admin/tenants/initech/keys/{record['id']}", headers=operator).raise_for_status()
        refusal = client.post("/v1/completions", json=body, headers=headers)
        pauses = 0  # of 10 ms: a slow machine adds to them, but the gateway has no more turns in that
        while refusal.status_code == 200 and pauses < 100:
            pauses += 1
            time.sleep(0.01)
            refusal = client.post("/v1/completions", json=body, headers=headers)
        unknown = client.post(
            "/v1/completions", json=body, headers={"Authorization": f"Bearer {key[:-4]}0000"}
        )
    assert refusal.status_code == unknown.status_code == 401
    assert refusal.content == unknown.content
    assert refusal.json()["error"]["type"] == "authentication_error"
    assert refusal.json()["error"]["code"] == "invalid_api_key"
