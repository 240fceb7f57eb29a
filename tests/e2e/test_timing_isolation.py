"""What a private tenant has cached stays its own: whatever others send, they neither hit nor time it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Stack
from tests.e2e.tiny import TINY, words
from tests.gateway.fake_engine import make_tokenizer

pytestmark = pytest.mark.e2e

TRIES = 100
PROMPT_TOKENS = 810
CACHED_TOKENS = 800
"""The whole blocks of a prompt."""
VICTIM, ATTACKER = "victim", "attacker"
MAX_Z = 3.89
"""A normal variable is farther from zero once in 10,000 times: how often a right server fails."""


@dataclass(frozen=True)
class Forgery:
    """What a request claims that it has no right to."""

    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


FORGERIES = (
    Forgery(),
    Forgery(body={"cache_salt": "a salt that the attacker has guessed"}),
    Forgery(body={"user": VICTIM}),
    Forgery(body={"metadata": {"tenant": VICTIM, "tenant_id": VICTIM, "cache_scope": VICTIM}}),
    Forgery(headers={"X-Tenant": VICTIM, "X-Tenant-Id": VICTIM, "X-Loraplex-Tenant": VICTIM}),
    Forgery(headers={"X-User": VICTIM, "X-Forwarded-User": VICTIM, "OpenAI-Organization": VICTIM}),
    Forgery(headers={"X-Api-Key": VICTIM, "Cookie": f"tenant={VICTIM}", "X-Cache-Scope": VICTIM}),
)


@dataclass(frozen=True)
class Tenant:
    """A client with a key of its own, over one connection."""

    client: httpx.Client
    key: str

    def ask(self, prompt: str, forgery: Forgery) -> tuple[float, int]:
        """Asks for one token. Returns the seconds until it was there, and the tokens that were cached."""
        body = {"model": TINY, "prompt": prompt, "max_tokens": 1, "temperature": 0, **forgery.body}
        headers = {**forgery.headers, "Authorization": f"Bearer {self.key}"}
        started = time.perf_counter()
        answer = self.client.post("/v1/completions", json=body, headers=headers)
        seconds = time.perf_counter() - started
        assert answer.status_code == 200, answer.text
        return seconds, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """How far the ranks of two paired samples are apart, as a standard normal variable if they are alike.

    A permutation test: were the two of a pair alike, each could as well be the other, whatever the machine's
    load was in that moment. Exchanging them at random gives the sum of the differences a mean of zero, and a
    variance of the sum of their squares. Ranks, since a busy machine makes single times as long as it likes.
    """
    order = sorted(range(2 * len(first)), key=[*first, *second].__getitem__)
    ranks = [0] * len(order)
    for rank, index in enumerate(order):
        ranks[index] = rank
    differences = [ranks[i] - ranks[i + len(first)] for i in range(len(first))]
    return sum(differences) / math.sqrt(sum(difference**2 for difference in differences))


def test_what_a_private_tenant_has_cached_is_as_slow_for_others_as_what_nobody_has(tiny_stack: Stack) -> None:
    """The victim sends each prompt for the first time, then the attacker sends it, and the victim again; and
    the attacker sends one that nobody has sent.

    Whoever sends a prompt makes the same claims. What is timed in one try is in random order, and the first
    time is that of the next try's prompt, so that nothing sets the four apart but the cache and the tenant;
    and nothing but the cache the two that each tenant sends. (A tenant that asks less often than another is
    some half millisecond slower, so the attacker's times are compared with its own, and both ask as often.)
    """
    rng, tokenizer = random.Random(11), make_tokenizer()
    prompts = [tokenizer.decode(words(PROMPT_TOKENS, seed)) for seed in range(2 * TRIES + 1)]
    claims = [FORGERIES[number % len(FORGERIES)] for number in range(TRIES + 1)]
    seconds: dict[str, list[float]] = {"first": [], "attack": [], "again": [], "nobody's": []}
    with httpx.Client(base_url=tiny_stack.url, timeout=60) as client:
        victim, attacker = (Tenant(client, tiny_stack.create_tenant(name)) for name in (VICTIM, ATTACKER))
        victim.ask(prompts[0], claims[0])
        for number in range(TRIES):
            asked = [
                ("first", victim, number + 1, claims[number + 1]),
                ("attack", attacker, number, claims[number]),
                ("again", victim, number, claims[number]),
                ("nobody's", attacker, TRIES + 1 + number, claims[number]),
            ]
            rng.shuffle(asked)
            for what, tenant, index, claim in asked:
                taken, cached = tenant.ask(prompts[index], claim)
                seconds[what].append(taken)
                assert cached == (CACHED_TOKENS if what == "again" else 0), (what, claim)
    apart = rank_test(seconds["again"], seconds["first"])
    assert apart < -MAX_Z, "a hit is not seen in time here, so it shows nothing that the attacker sees none"
    assert abs(rank_test(seconds["attack"], seconds["nobody's"])) < MAX_Z
