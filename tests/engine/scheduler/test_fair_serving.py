"""What tenants get of a busy engine, over minutes of virtual time."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable
from itertools import accumulate

from builders import make_request
from virtual_engine import Life, VirtualEngine

NUM_REQUESTS = 200
WINDOW_S = 60.0


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def send_flood(
    engine: VirtualEngine, tenant: str, *, weight: float = 1.0, prompt: int = 128, output: int = 160
) -> list[Life]:
    """Has a tenant send 200 long requests within a fifth of a second, over eight adapters."""
    rng = random.Random(tenant)
    lives: list[Life] = []
    for number in range(NUM_REQUESTS):
        adapter = f"{tenant}-{number % 8}"
        engine.store.add(adapter, 16)
        request = make_request(
            [rng.randrange(1000) for _ in range(prompt)],
            link=tenant,
            request_id=number,
            tenant=tenant,
            weight=weight,
            adapter=adapter,
            max_tokens=output,
        )
        lives.append(engine.send(request, number / 1000))
    return lives


def send_trickle(engine: VirtualEngine, tenant: str, count: int) -> list[Life]:
    """Has a tenant send a short request every second, each for an adapter that the engine does not have.

    It begins when a flood that began before has its first eight prompts behind it.
    """
    rng = random.Random(tenant)
    lives: list[Life] = []
    for number in range(count):
        engine.store.add(f"cold-{number}", 16)
        request = make_request(
            [rng.randrange(1000) for _ in range(24)],
            link=tenant,
            request_id=number,
            tenant=tenant,
            adapter=f"cold-{number}",
            max_tokens=8,
        )
        lives.append(engine.send(request, 1.5 + number + rng.random() / 2))
    return lives


def as_one_tenant(engine: VirtualEngine) -> None:
    """First come, first served: that is what the scheduler does within a tenant."""
    for life in engine.lives.values():
        life.request.tenant, life.request.weight = "all", 1.0


def tokens_per_second(engine: VirtualEngine) -> float:
    return sum(life.num_tokens for life in engine.lives.values()) / engine.now


def serve(send: Callable[[VirtualEngine], None], *, first_come: bool = False) -> VirtualEngine:
    """Serves what ``send`` sends, to the last request, in room for eight adapters and eight sequences."""
    engine = VirtualEngine()
    send(engine)
    if first_come:
        as_one_tenant(engine)
    engine.run()
    engine.scheduler.check()
    assert all(life.ended for life in engine.lives.values())
    return engine


def test_a_flood_over_eight_adapters_hardly_delays_short_requests_for_cold_ones() -> None:
    alone, busy = VirtualEngine(), VirtualEngine()
    undisturbed = send_trickle(alone, "b", 120)
    alone.run()
    send_flood(busy, "a")
    disturbed = send_trickle(busy, "b", 120)
    busy.run()
    assert min(life.ended or 0 for life in busy.lives.values() if life.request.tenant == "a") < 10
    assert max(life.ended or 0 for life in busy.lives.values() if life.request.tenant == "a") > 119
    p99 = percentile([life.ttft for life in disturbed], 0.99)
    assert p99 <= 2 * percentile([life.ttft for life in undisturbed], 0.99)

    def send(engine: VirtualEngine) -> None:
        send_flood(engine, "a")
        send_trickle(engine, "b", 120)

    queued = serve(send, first_come=True)
    assert tokens_per_second(busy) >= 0.95 * tokens_per_second(queued)
    waits = [life.ttft for life in queued.lives.values() if life.request.link == "b"]
    assert percentile(waits, 0.5) > 100 * p99, "what fairness is for"


def test_two_backlogged_tenants_get_service_by_their_weights() -> None:
    engine = VirtualEngine()
    gaps: list[float] = []
    engine.after_step = lambda plan: gaps.append(engine.scheduler.figures()["fairness_gap"])

    def send(engine: VirtualEngine) -> None:
        send_flood(engine, "a")
        send_flood(engine, "c", weight=2.0, output=128)

    send(engine)
    engine.run()
    both_wait_until = min(
        max(life.first_token or 0 for life in engine.lives.values() if life.request.tenant == tenant)
        for tenant in "ac"
    )
    served = {
        tenant: ([time for time, _ in steps], [0.0, *accumulate(cost for _, cost in steps)])
        for tenant, steps in engine.service.items()
    }

    def between(tenant: str, begin: float, end: float) -> float:
        times, sums = served[tenant]
        return sums[bisect(times, end)] - sums[bisect(times, begin)]

    begins = range(int(both_wait_until - WINDOW_S))
    assert len(begins) > 30
    for begin in begins:
        ratio = between("c", begin, begin + WINDOW_S) / between("a", begin, begin + WINDOW_S)
        assert 0.9 * 2 <= ratio <= 1.1 * 2, f"in the minute from {begin} s on"
    most_tokens, longest_prompt, load = engine.num_blocks * 16, 128, 6
    bound = 2 * max(longest_prompt + load, 2 * most_tokens)
    for time in range(int(both_wait_until)):
        assert abs(between("a", 0, time) - between("c", 0, time) / 2) <= bound
    assert 0 < max(gaps) <= bound
    queued = serve(send, first_come=True)
    assert tokens_per_second(engine) >= 0.95 * tokens_per_second(queued)
