"""Routing: gateways agree without talking, keys spread evenly, and load and residency correct the hash."""

from __future__ import annotations

import random
from collections import Counter

from gateway.routing import Candidate, affinity_key, choose

ENGINES = [f"engine-{index}" for index in range(5)]
KEYS = [random.Random(index).randbytes(32) for index in range(2000)]


def idle(engines: list[str] = ENGINES) -> list[Candidate]:
    return [Candidate(engine, 0) for engine in engines]


def test_gateways_agree_whatever_the_order_they_know_engines_in() -> None:
    for key in KEYS[:200]:
        shuffled = idle()
        random.Random(key).shuffle(shuffled)
        assert choose(key, shuffled) == choose(key, idle())


def test_keys_spread_evenly() -> None:
    counts = Counter(choose(key, idle()) for key in KEYS)
    assert set(counts) == set(ENGINES)
    assert all(300 < count < 500 for count in counts.values()), counts


def test_an_engine_that_goes_moves_only_its_own_keys() -> None:
    remaining = ENGINES[1:]
    for key in KEYS:
        before, after = choose(key, idle()), choose(key, idle(remaining))
        assert before == after or before == ENGINES[0]


def test_an_overloaded_engine_is_passed_over_and_a_busy_one_is_not() -> None:
    key = KEYS[0]
    home = choose(key, idle())
    busy = [Candidate(engine, 4 if engine == home else 0) for engine in ENGINES]
    overloaded = [Candidate(engine, 40 if engine == home else 10) for engine in ENGINES]
    assert choose(key, busy) == home
    assert choose(key, overloaded) != home


def test_an_engine_that_holds_the_adapter_wins_unless_it_is_overloaded() -> None:
    for key in KEYS[:50]:
        home = choose(key, idle())
        holder = next(engine for engine in ENGINES if engine != home)
        resident = [Candidate(engine, 0, engine == holder) for engine in ENGINES]
        assert choose(key, resident) == holder
        overloaded = [Candidate(engine, 100 * (engine == holder), engine == holder) for engine in ENGINES]
        assert choose(key, overloaded) == home


def test_one_hot_key_spreads_as_its_load_grows() -> None:
    loads = dict.fromkeys(ENGINES, 0)
    for _ in range(200):
        chosen = choose(KEYS[0], [Candidate(engine, load) for engine, load in loads.items()])
        loads[chosen] += 1
    assert max(loads.values()) <= 1.25 * 40 + 5, loads


def test_keys_are_the_adapter_or_the_scope_and_the_prompts_beginning() -> None:
    prompt = list(range(100))
    assert affinity_key(b"d" * 32, b"scope", prompt) == affinity_key(b"d" * 32, b"other", [1])
    assert affinity_key(b"", b"scope", prompt) == affinity_key(b"", b"scope", [*prompt[:32], 7])
    assert affinity_key(b"", b"scope", prompt) != affinity_key(b"", b"scope", [7, *prompt[1:]])
    assert affinity_key(b"", b"scope", prompt) != affinity_key(b"", b"other", prompt)


def test_an_engine_is_passed_over_beyond_a_quarter_above_the_mean_and_four() -> None:
    key = next(
        key
        for key in (bytes([number]) for number in range(256))
        if choose(key, [Candidate("a", 0), Candidate("b", 0)]) == "a"
    )
    assert choose(key, [Candidate("a", 14), Candidate("b", 2)]) == "a"  # 1.25 × 8 + 4
    assert choose(key, [Candidate("a", 15), Candidate("b", 2)]) == "b"
    assert choose(key, [Candidate("a", 99)]) == "a", "there is no other"
