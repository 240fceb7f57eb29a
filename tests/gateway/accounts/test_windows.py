"""The scripts of an account against a model of it in plain Python; their calendar against the real one."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.accounts.windows import (
    ADMIT,
    CONCURRENT,
    INPUT_TOKENS,
    MONTH_TOKENS,
    OUTPUT_TOKENS,
    REQUESTS,
    SHARED,
    root_of,
)

WINDOW_MS, LEASE_MS = 12, 17
SUBJECTS = ("tenant", "key:k", "adapter:a")
SETTLE = (
    SHARED
    + """
local open = redis.call('HGET', KEYS[1] .. ':open', ARGV[1])
local reserved = open and cjson.decode(open).reserved
settle_windows(KEYS[1], reserved, tonumber(ARGV[2]), tonumber(ARGV[3]), now_ms())
release(KEYS[1], ARGV[1], reserved)
"""
)
RENEW = (
    SHARED
    + """
local now, open = now_ms(), redis.call('HGET', KEYS[1] .. ':open', ARGV[1])
renew(KEYS[1], ARGV[1], cjson.decode(open).reserved, now + ARGV[2])
return now
"""
)
_tenants = itertools.count()


@dataclass
class Model:
    """What an account holds, as its rules say it."""

    windows: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)  # first ms, used
    leases: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))  # request: expiry
    month: int = 0
    held: dict[int, list[tuple[str, str, int, int]]] = field(default_factory=dict)

    def standing(self, subject: str, kind: str, now: int) -> tuple[int, int]:
        if kind == CONCURRENT:
            return sum(expiry > now for expiry in self.leases[subject].values()), 0
        if kind == MONTH_TOKENS:
            return self.month, 0
        start, used = self.windows.get((subject, kind), (0, 0))
        return (0, 0) if now >= start + WINDOW_MS else (used, start)

    def admit(self, request: int, limits: list[tuple[str, str, int, int]], now: int) -> list[int]:
        standings = [self.standing(subject, kind, now) for subject, kind, _, _ in limits]
        pairs = list(zip(limits, standings, strict=True))
        if any(used + amount > most for (_, _, most, amount), (used, _) in pairs):
            return [0, now, *itertools.chain(*standings)]
        self.held[request] = []
        self.leases["tenant"][request] = now + LEASE_MS
        reply = [1, now]
        for (subject, kind, _, amount), (used, start) in pairs:
            if kind == CONCURRENT:
                self.leases[subject][request] = now + LEASE_MS
            elif kind == MONTH_TOKENS:
                self.month += amount
                self.held[request].append((subject, kind, 0, amount))
            else:
                start = start or now
                self.windows[subject, kind] = (start, used + amount)
                self.held[request].append((subject, kind, start, amount))
            reply += [used + amount, start]
        return reply

    def settle(self, request: int, used: dict[str, int]) -> None:
        counted = False
        for subject, kind, start, amount in self.held.pop(request):
            if kind == MONTH_TOKENS:
                self.month += sum(used.values()) - amount
                counted = True
            elif kind != REQUESTS and self.windows[subject, kind][0] == start:
                self.windows[subject, kind] = (start, self.windows[subject, kind][1] + used[kind] - amount)
        if not counted:
            self.month += sum(used.values())
        for leases in self.leases.values():
            leases.pop(request, None)


LIMITS = st.lists(
    st.tuples(
        st.sampled_from(SUBJECTS),
        st.sampled_from([REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS, CONCURRENT]),
        st.integers(3, 20),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda limit: limit[:2],
)
NOT_ASKED = ((), (), (0,), (1,), (2,), (0, 2), (1, 2))
"""Limits that a request does not meet, by their places: so windows of one subject begin one by one."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 4), st.integers(1, 6), st.sampled_from(NOT_ASKED)),
        st.tuples(st.just("settle"), st.integers(0, 9), st.sampled_from([0, 0.5, 1])),
        st.tuples(st.just("renew"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.sampled_from([1, 5, 13])),
    ),
    min_size=6,
    max_size=20,
)


ONE_WINDOW_ENDS_FIRST = [
    ("admit", 4, 1, (1,)),
    ("wait", 8),
    ("admit", 4, 1, ()),
    ("wait", 6),
    ("admit", 4, 1, ()),
]


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(LIMITS, st.none() | st.integers(20, 60), STEPS)
@example([("tenant", REQUESTS, 9), ("tenant", INPUT_TOKENS, 9)], None, ONE_WINDOW_ENDS_FIRST)
def test_the_scripts_keep_the_accounts_rules(
    valkey_url: str,
    rates: list[tuple[str, str, int]],
    month: int | None,
    steps: list[tuple[Any, ...]],
) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        root, model, asked = root_of(f"t{next(_tenants)}"), Model(), itertools.count()
        admit, settle = client.register_script(ADMIT), client.register_script(SETTLE)
        renew = client.register_script(RENEW)
        running: dict[int, tuple[int, int]] = {}
        for verb, *values in steps:
            if verb == "admit":
                tokens, not_asked = values[:2], values[2]
                amounts = {INPUT_TOKENS: tokens[0], OUTPUT_TOKENS: tokens[1], MONTH_TOKENS: sum(tokens)}
                most = [rule for place, rule in enumerate(rates) if place not in not_asked]
                most += [("tenant", MONTH_TOKENS, month)] if month is not None else []
                limits = [(*rule, amounts.get(rule[1], 1)) for rule in most]
                request = next(asked)
                ask = json.dumps({"lease": LEASE_MS, "window": WINDOW_MS, "limits": limits})
                reply = json.loads(admit([root], [request, ask, "[]"]))
                assert reply == model.admit(request, limits, reply[1])
                if reply[0]:
                    running[request] = (values[0], values[1])
                    again = json.loads(admit([root], [request, ask, "[]"]))
                    assert again[0] == 1, "a call that is repeated is admitted, and takes nothing"
            elif verb == "wait":
                time.sleep(values[0] / 1000)
            elif running:
                request = sorted(running)[values[0] % len(running)]
                if verb == "renew":
                    now = renew([root], [request, LEASE_MS])
                    for leases in model.leases.values():
                        if request in leases:
                            leases[request] = now + LEASE_MS
                    continue
                input_tokens, output_tokens = running.pop(request)
                # What no engine took has used nothing of its input either.
                used = {
                    INPUT_TOKENS: input_tokens if values[1] else 0,
                    OUTPUT_TOKENS: round(values[1] * output_tokens),
                }
                settle([root], [request, *used.values()])
                model.settle(request, used)
        check_account(client, root, model)
        assert client.hlen(f"{root}:open") == len(running)


def check_account(client: redis.Redis, root: str, model: Model) -> None:
    """Looks at what Redis holds itself, since not all of it decides a later request."""
    found: Any = client
    assert sum(int(found.get(key)) for key in found.keys(f"{root}:month:*")) == model.month
    for subject in SUBJECTS:
        leases = f"{root}:leases" if subject == "tenant" else f"{root}:leases:{subject}"
        assert {int(name): expiry for name, expiry in found.zrange(leases, 0, -1, withscores=True)} == {
            request: expiry for request, expiry in model.leases[subject].items()
        }
        window = {
            name.decode(): int(value) for name, value in found.hgetall(f"{root}:window:{subject}").items()
        }
        for kind in (REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS):
            if kind in window:
                assert (window[f"{kind}:start"], window[kind]) == model.windows[subject, kind]


def test_what_is_given_back_goes_into_the_window_it_came_from(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url, decode_responses=True) as client:
        admit, settle = client.register_script(ADMIT), client.register_script(SETTLE)
        ask = {"lease": LEASE_MS, "window": WINDOW_MS, "limits": [["tenant", OUTPUT_TOKENS, 10, 10]]}
        root = root_of("acme")
        assert json.loads(admit([root], ["before", json.dumps(ask), "[]"]))[0] == 1
        time.sleep(WINDOW_MS / 1000 + 0.002)
        later = json.dumps(ask | {"window": 60_000})
        assert json.loads(admit([root], ["after", later, "[]"]))[0] == 1
        settle([root], ["before", 0, 1])
        assert client.hget(f"{root}:window:tenant", OUTPUT_TOKENS) == "10"


def test_a_request_that_was_settled_does_not_come_back_to_life(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url, decode_responses=True) as client:
        renew = client.register_script(
            SHARED + "renew(KEYS[1], ARGV[1], {leases = {'key:k'}}, now_ms() + 9999)"
        )
        renew([root_of("acme")], ["settled"])
        assert client.keys("*") == []


def test_a_day_is_the_calendars(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url, decode_responses=True) as client:
        script = client.register_script(SHARED + "return day_of(ARGV[1] * 1000)")
        first, last = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (1999, 2101))
        for second in [*range(first, last, 86400 * 11 + 3571), 951782399, 951782400, 1709251199, 1709251200]:
            expected = datetime.fromtimestamp(second, UTC).date().isoformat()
            assert script(args=[second]) == expected


def test_what_was_let_through_unseen_counts_in_the_month_and_nowhere_else(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url, decode_responses=True) as client:
        script = client.register_script(SHARED + "settle_windows(KEYS[1], nil, 3, 4, 1706745599000)")
        script([root_of("acme")])
        assert client.keys("*") == ["loraplex:{acme}:month:2024-01"]
        assert client.get("loraplex:{acme}:month:2024-01") == "7"
        assert 69 * 86400 < client.ttl("loraplex:{acme}:month:2024-01") <= 70 * 86400  # type: ignore[operator]


def test_a_window_from_a_clock_that_was_ahead_is_over_and_one_that_has_just_begun_is_not(
    valkey_url: str,
) -> None:
    with redis.Redis.from_url(valkey_url, decode_responses=True) as client:
        admit = client.register_script(ADMIT)
        ask = json.dumps({"lease": 60_000, "window": 60_000, "limits": [["tenant", REQUESTS, 1, 1]]})
        for ahead_ms, admitted in ((3_600_000, 1), (30_000, 0)):
            window: dict[Any, Any] = {REQUESTS: 1, f"{REQUESTS}:start": int(time.time() * 1000) + ahead_ms}
            client.hset("loraplex:{acme}:window:tenant", mapping=window)
            assert json.loads(admit([root_of("acme")], [f"r{ahead_ms}", ask, "[]"]))[0] == admitted


@pytest.mark.parametrize("kind", [REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS])
def test_a_window_is_gone_from_redis_when_it_is_over(valkey_url: str, kind: str) -> None:
    with redis.Redis.from_url(valkey_url, decode_responses=True) as client:
        ask = {"lease": LEASE_MS, "window": WINDOW_MS, "limits": [["tenant", kind, 5, 1]]}
        client.register_script(ADMIT)([root_of("acme")], ["r", json.dumps(ask), "[]"])
        time.sleep(WINDOW_MS / 1000 + 0.01)
        assert not client.exists("loraplex:{acme}:window:tenant")
