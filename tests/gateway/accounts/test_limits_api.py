"""What limits look like over HTTP, also where the engine does not take a request that they let pass."""

from __future__ import annotations

from typing import Any

import httpx

from gateway.keys import Keys
from gateway.limits import RateLimits, TenantLimits
from gateway.tenants import Tenants
from tests.gateway.fake_engine import MODEL
from tests.gateway.local_stack import LocalStack, wait_until

OUTPUT = "x-ratelimit-remaining-output-tokens"


def add_tenant(stack: LocalStack, tenant: str, rates: RateLimits) -> dict[str, str]:
    """Makes a tenant with these limits. Returns the headers that hold a key of it."""

    async def add() -> str:
        redis = stack.app.state.services.redis
        await Tenants(redis).create(tenant, tenant_id=tenant, limits=TenantLimits(rates))
        return (await Keys(redis).create(tenant))[1]

    return {"Authorization": f"Bearer {stack.call(add())}"}


def used(stack: LocalStack, tenant: str) -> dict[str, int]:
    """What is used of the tenant's windows."""

    async def read() -> dict[bytes, bytes]:
        return await stack.app.state.services.redis.hgetall(f"loraplex:{{{tenant}}}:window:tenant")

    found = stack.call(read())
    return {name.decode(): int(value) for name, value in found.items() if not name.endswith(b":start")}


def test_answers_streams_and_errors_say_how_the_limits_stand(local_stack: LocalStack) -> None:
    rates = RateLimits(requests_per_minute=4, input_tokens_per_minute=1000, output_tokens_per_minute=100)
    key = add_tenant(local_stack, "acme", rates)

    def ask(**more: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 10, "ignore_eos": True, **more}
        return httpx.post(f"{local_stack.url}/v1/completions", json=body, headers=key, timeout=30)

    whole = ask()
    assert (whole.status_code, whole.headers[OUTPUT]) == (200, "90")
    streamed = ask(stream=True)
    assert (streamed.status_code, streamed.headers[OUTPUT]) == (200, "80")
    assert streamed.headers["x-ratelimit-remaining-requests"] == "2"

    [engine] = local_stack.engines
    engine.refusing = True
    refused = ask(max_tokens=50)
    engine.refusing = False
    assert (refused.status_code, refused.headers[OUTPUT]) == (503, "30")
    expected = {"requests_per_minute": 3, "input_tokens_per_minute": 10, "output_tokens_per_minute": 20}
    wait_until(
        lambda: used(local_stack, "acme") == expected, "what no engine took costs a request and nothing else"
    )

    assert ask(max_tokens=101).json()["error"]["code"] == "request_exceeds_limit"
    assert used(local_stack, "acme") == expected
    assert ask().headers["x-ratelimit-remaining-requests"] == "0"
    for invalid in ({}, {"prompt": 7}):  # the second is refused from memory, before its body is looked at
        late = ask(**invalid)
        assert late.status_code == 429 and late.json()["error"]["param"] == "requests_per_minute"
        assert late.headers["x-ratelimit-remaining-requests"] == "0"
    text = httpx.get(f"{local_stack.url}/metrics").text
    assert 'loraplex_limit_rejections_total{limit="requests_per_minute"} 2' in text


def test_a_chat_without_a_length_ends_where_its_limit_does(local_stack: LocalStack) -> None:
    key = add_tenant(local_stack, "acme", RateLimits(output_tokens_per_minute=240))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "n": 2}
    more = {"ignore_eos": True, "priority": -3}
    url = f"{local_stack.url}/v1/chat/completions"
    answer = httpx.post(url, json=body | more, headers=key, timeout=30).json()
    assert answer["usage"]["completion_tokens"] == 60
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    [submit] = local_stack.engines[0].submits
    assert (submit.max_tokens, submit.priority) == (30, -3)


def test_a_search_without_a_length_ends_there_too(local_stack: LocalStack) -> None:
    key = add_tenant(local_stack, "acme", RateLimits(output_tokens_per_minute=240))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "n": 2, "ignore_eos": True}
    url = f"{local_stack.url}/v1/chat/completions"
    answer = httpx.post(url, json=body | {"use_beam_search": True}, headers=key, timeout=30).json()
    assert answer["usage"]["completion_tokens"] == 60
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
