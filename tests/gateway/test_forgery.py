"""Nothing that a client sends but its key says who it is: tenant, scope, digest and whose limits it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
import redis

from protos.engine_pb2 import Submit
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.local_stack import LocalStack, wait_until

VICTIM, ATTACKER = "victim", "attacker"
VICTIMS_DIGEST, ATTACKERS_DIGEST = b"\xc1" * 32, b"\xa1" * 32
SALT = "salt"
NOTHING: Mapping[str, Any] = {}
MESSAGES = [{"role": "user", "content": "Hello"}]
ROUTES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1, "seed": 1},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1, "seed": 1},
}
OTHER_ROUTES: Mapping[str, Mapping[str, Any]] = {
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1, "seed": 1},
    "/v1/embeddings": {"input": "Hello"},
}
OTHER_CLAIMS: Mapping[str, Mapping[str, Any]] = {
    "/v1/messages": {"metadata": {"user_id": VICTIM}},
    "/v1/embeddings": {"user": VICTIM},
}
BODIES: tuple[Mapping[str, Any], ...] = (
    {"user": VICTIM},
    {"metadata": {"tenant": VICTIM, "tenant_id": VICTIM, "key": VICTIM, "cache_scope": VICTIM}},
)
HEADERS = (
    {
        "X-Tenant": VICTIM,
        "X-Tenant-Id": VICTIM,
        "X-Loraplex-Tenant": VICTIM,
        "X-Loraplex-Cache-Scope": VICTIM,
    },
    {"OpenAI-Organization": VICTIM, "OpenAI-Project": VICTIM, "X-Org": VICTIM},
    {"X-Forwarded-User": VICTIM, "X-Remote-User": VICTIM, "X-User": VICTIM, "From": VICTIM},
    {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1", "X-Real-IP": "127.0.0.1"},
    {"Cookie": f"tenant={VICTIM}", "X-Request-Id": VICTIM, "Baggage": f"tenant={VICTIM}"},
)


class Attack:
    """The attacker's requests, and what comes of them at the engine."""

    def __init__(self, stack: LocalStack) -> None:
        self.stack = stack
        self.engine: FakeEngine = stack.engines[0]
        self.keys = {tenant: stack.add_tenant(tenant) for tenant in (VICTIM, ATTACKER)}
        stack.add_adapter(VICTIM, "sql", VICTIMS_DIGEST)
        stack.add_adapter(VICTIM, "secret", VICTIMS_DIGEST)
        stack.add_adapter(ATTACKER, "sql", ATTACKERS_DIGEST)

    def send(
        self,
        route: str,
        body: Mapping[str, Any] = NOTHING,
        headers: Mapping[str, str] = NOTHING,
        query: str = "",
        tenant: str = ATTACKER,
    ) -> httpx.Response:
        return httpx.post(
            f"{self.stack.url}{route}{query}",
            json={"model": "sql", **{**ROUTES, **OTHER_ROUTES}[route], **body},
            headers={"Authorization": f"Bearer {self.keys[tenant]}", **headers},
            timeout=30,
        )

    def reaches(self, route: str, body: Mapping[str, Any] = NOTHING, **claims: Any) -> Submit:
        """Sends a request that is answered. Returns what the engine got of it, without its running number."""
        answer = self.send(route, body, **claims)
        assert answer.status_code == 200, answer.text
        submit = Submit()
        submit.CopyFrom(self.engine.submits[-1])
        for volatile in ("request_id", "deadline_ms"):
            submit.ClearField(volatile)
        return submit


@pytest.fixture
def attack(local_stack: LocalStack) -> Attack:
    return Attack(local_stack)


@pytest.mark.parametrize("route", ROUTES)
def test_claims_change_nothing_of_what_reaches_an_engine(attack: Attack, route: str) -> None:
    honest = attack.reaches(route)
    assert (honest.tenant, honest.adapter_digest) == (ATTACKER, ATTACKERS_DIGEST)
    for body in BODIES:
        assert attack.reaches(route, body) == honest, body
    for headers in HEADERS:
        assert attack.reaches(route, headers=headers) == honest, headers
    assert attack.reaches(route, query=f"?tenant={VICTIM}&tenant_id={VICTIM}&api_key={VICTIM}") == honest


@pytest.mark.parametrize("route", OTHER_ROUTES)
def test_nor_do_they_where_bodies_have_other_forms(attack: Attack, route: str) -> None:
    honest = attack.reaches(route)
    assert (honest.tenant, honest.adapter_digest) == (ATTACKER, ATTACKERS_DIGEST)
    assert honest.cache_scope == attack.reaches("/v1/completions").cache_scope
    for claims in [{"body": OTHER_CLAIMS[route]}, *({"headers": headers} for headers in HEADERS)]:
        assert attack.reaches(route, **claims) == honest, claims
    for field in ("tenant", "adapter_digest", "cache_scope", "weight"):
        assert attack.send(route, {field: VICTIM}).status_code == 400, field
    assert attack.send(route, {"model": "victim/sql"}).status_code == 404


@pytest.mark.parametrize("route", ROUTES)
def test_a_salt_never_leads_into_anothers_scope(attack: Attack, route: str) -> None:
    honest = attack.reaches(route)
    scopes = {attack.reaches(route, body, tenant=VICTIM).cache_scope for body in ({}, {"cache_salt": SALT})}
    for salt in (SALT, VICTIM, "tenant\0victim", "shared", *(scope.hex() for scope in scopes)):
        salted = attack.reaches(route, {"cache_salt": salt})
        assert salted.cache_scope not in {honest.cache_scope, *scopes}, salt
        salted.cache_scope = honest.cache_scope
        assert salted == honest, salt


@pytest.mark.parametrize("route", ROUTES)
def test_anothers_adapter_is_not_reached_by_any_name(attack: Attack, route: str) -> None:
    names = ("secret", "secret@1", "victim/secret", "victim/sql@1", "victim:sql", "../victim/sql", "sql@2")
    before = len(attack.engine.submits)
    for name in (
        *names,
        VICTIMS_DIGEST.hex(),
        f"sha256:{VICTIMS_DIGEST.hex()}",
        f"sql@{VICTIMS_DIGEST.hex()}",
    ):
        answer = attack.send(route, {"model": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), name
    for field in ("tenant", "adapter_digest", "cache_scope", "weight", "key", "limits"):
        answer = attack.send(route, {field: VICTIM})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert len(attack.engine.submits) == before
    assert VICTIMS_DIGEST not in attack.engine.announced


def test_whoever_it_claims_to_be_it_is_the_attacker_that_pays(attack: Attack) -> None:
    forged = [{"headers": headers} for headers in HEADERS] + [{"body": body} for body in BODIES]
    for route in ROUTES:
        for claims in forged:
            attack.reaches(route, **claims)
    usage = {"Authorization": f"Bearer {attack.keys[ATTACKER]}"}

    def all_are_written() -> bool:
        total = httpx.get(f"{attack.stack.url}/v1/usage", headers=usage).json()["total"]
        return total["requests"] == len(ROUTES) * len(forged)

    wait_until(all_are_written, "the attacker's requests are in its ledger")
    with redis.Redis.from_url(attack.stack.redis_url) as client:
        assert not list(client.scan_iter(f"loraplex:{{{VICTIM}}}:*"))
