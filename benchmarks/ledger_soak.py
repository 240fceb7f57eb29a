"""Does the ledger add up? Many requests, some of whose clients go, over gateways that are killed and a Redis
that is: then the ledger, its sums, the month's counters, the clients and the engines are compared.

    python -m benchmarks.ledger_soak --requests 10000
    python -m benchmarks.ledger_soak --outage-s 30      # Redis away once, under a steady load

Prints one JSON object: what was counted on each side, and `faults`, which must be empty.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from benchmarks.ledger_stack import LEASE_S, Answer, LedgerStack
from gateway.accounts.entry import FIELDS, LedgerEntry, Outcome
from gateway.accounts.settle import SEPARATOR
from gateway.accounts.windows import root_of

CONCURRENCY = 24
LEAVING = 0.2
SETTLED_S = 2.5
"""How long after a request's end a gateway must have lived for its end to be in the ledger."""
_PATIENCE_S = 60.0


@dataclass
class Evidence:
    """All that is compared. `recorded` has, by request id, how many output tokens Redis was seen to hold of a
    running request just before a gateway was killed.
    """

    answers: list[Answer]
    counted: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    entries: list[LedgerEntry] = field(default_factory=list)
    sums: Counter[str] = field(default_factory=Counter)
    months: Counter[str] = field(default_factory=Counter)
    left_open: list[str] = field(default_factory=list)
    recorded: dict[str, int] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Returns what does not add up, one sentence each."""
        return [
            *self._faults_of_sums(),
            *self._faults_of_entries(),
            *self._faults_of_answers(),
            *self._faults_of_numbers(),
        ]

    def _faults_of_sums(self) -> list[str]:
        faults = [f"{name} is left" for name in self.left_open]
        expected: Counter[str] = Counter()
        months: Counter[str] = Counter()
        for entry in self.entries:
            expected[f"{entry.tenant} requests"] += 1
            for name in ("input_tokens", "cached_tokens", "output_tokens"):
                expected[f"{entry.tenant} {name}"] += getattr(entry, name)
            months[entry.tenant] += entry.input_tokens + entry.output_tokens
        if +self.sums != +expected:
            faults.append(f"the aggregates differ from the ledger: {+self.sums} and {+expected}")
        if +self.months != +months:
            faults.append(f"the months' counters differ from the ledger: {+self.months} and {+months}")
        return faults

    def _faults_of_entries(self) -> list[str]:
        faults = [f"{id} is there twice" for id, n in Counter(e.id for e in self.entries).items() if n > 1]
        faults += [
            f"{name} has {len(found)} entries" for name, found in self.named().items() if len(found) > 1
        ]
        for entry in self.entries:
            _, given = self.counted.get(_name(entry), (0, 0))
            if entry.output_tokens > given:
                faults.append(f"{_name(entry)} has {entry.output_tokens} tokens, but engines gave {given}")
            if entry.output_tokens < self.recorded.get(entry.id, 0):
                faults.append(f"{_name(entry)} has fewer tokens than had been recorded: {entry}")
        return faults

    def _faults_of_answers(self) -> list[str]:
        faults, named = [], self.named()
        for answer in self.answers:
            found = named.get(answer.name, [])
            _, given = self.counted.get(answer.name, (0, 0))
            booked = found[0].output_tokens if found else 0
            if answer.outlived(SETTLED_S):
                exact = not answer.complete or answer.tokens == booked == given
                if not exact or answer.tokens > booked:
                    faults.append(f"{answer.name}: client {answer.tokens}, ledger {booked}, engines {given}")
        return faults

    def _faults_of_numbers(self) -> list[str]:
        """A request that an engine took is an entry, also when its client left before its gateway knew."""
        found = Counter(entry.tenant for entry in self.entries)
        most = Counter(answer.tenant for answer in self.answers)
        least = Counter(a.tenant for a in self.answers if a.name in self.counted and a.outlived(SETTLED_S))
        return [
            f"{tenant} has {found[tenant]} entries, not {least[tenant]} to {most[tenant]}"
            for tenant in most
            if not least[tenant] <= found[tenant] <= most[tenant]
        ]

    def named(self) -> dict[str, list[LedgerEntry]]:
        """The entries of which an engine had begun, since only they have a prompt, by tenant and prompt."""
        named: defaultdict[str, list[LedgerEntry]] = defaultdict(list)
        for entry in self.entries:
            if entry.input_tokens:
                named[_name(entry)].append(entry)
        return named

    def summary(self) -> dict[str, Any]:
        """Returns the totals of each side."""
        complete = [answer for answer in self.answers if answer.complete]
        return {
            "requests": len(self.answers),
            "statuses": Counter(answer.status for answer in self.answers),
            "complete": len(complete),
            "entries": len(self.entries),
            "outcomes": Counter(entry.outcome for entry in self.entries),
            "output_tokens": {
                "clients_complete": sum(answer.tokens for answer in complete),
                "ledger_complete": sum(
                    entry.output_tokens for entry in self.entries if entry.outcome == Outcome.COMPLETED
                ),
                "ledger": sum(entry.output_tokens for entry in self.entries),
                "engines": sum(given for _, given in self.counted.values()),
            },
            "recorded_before_kills": len(self.recorded),
        }


def _name(entry: LedgerEntry) -> str:
    return f"{entry.tenant}:{entry.input_tokens}"


async def collect(stack: LedgerStack, evidence: Evidence) -> None:
    """Reads the ledger and all that must agree with it, and looks for what was left in journals."""
    evidence.left_open += [path.name for path in stack.journal.glob("*") if path.stat().st_size]
    async with Redis.from_url(stack.redis_url, decode_responses=True) as redis:
        for tenant in stack.tenants:
            root = root_of(tenant)
            stream: Any = await redis.xrange(f"{root}:ledger")
            evidence.entries += [LedgerEntry.from_fields(fields) for _, fields in stream]
            async for key in redis.scan_iter(f"{root}:usage:*"):
                values: dict[str, str] = await redis.hgetall(key)  # type: ignore[misc]
                for name, value in values.items():
                    kind = name.rpartition(SEPARATOR)[2]
                    if kind != "errors":
                        evidence.sums[f"{tenant} {kind}"] += int(value)
            async for key in redis.scan_iter(f"{root}:month:*"):
                evidence.months[tenant] += int(await redis.get(key) or 0)
            for name in (":open", ":progress", ":leases"):
                if await redis.exists(root + name):
                    evidence.left_open.append(root + name)


async def settled(stack: LedgerStack) -> None:
    """Returns when no request is open any more and no journal waits, or after a long while."""
    deadline = time.monotonic() + _PATIENCE_S
    async with Redis.from_url(stack.redis_url) as redis:
        while time.monotonic() < deadline:
            open_keys = [key async for key in redis.scan_iter("loraplex:{*}:open")]
            if not open_keys and not any(path.stat().st_size for path in stack.journal.glob("*")):
                return
            await asyncio.sleep(0.1)


# ---- everything dies ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chaos:
    """How often things die, in seconds; `redis_away_s` is how long Redis is away each time."""

    gateway_every_s: float = 4.0
    redis_every_s: float = 15.0
    redis_away_s: float = 2.0


async def soak(stack: LedgerStack, requests: int, chaos: Chaos, seed: int = 1) -> Evidence:
    """Runs the requests while gateways and Redis die. Returns what clients saw, and what was recorded."""
    evidence = Evidence([])
    names = [(tenant, 1 + n) for n in range(-(-requests // len(stack.tenants))) for tenant in stack.tenants]
    left = iter(names[:requests])
    draw = random.Random(seed)

    async def client() -> None:
        for tenant, prompt in left:
            max_tokens = draw.randint(1, 60)
            leave_after_s = draw.uniform(0, 0.5) if draw.random() < LEAVING else None
            while True:
                gateway = draw.choice(stack.gateways)
                try:
                    answer = await stack.ask(
                        gateway, tenant, prompt, max_tokens=max_tokens, leave_after_s=leave_after_s
                    )
                except ConnectionError:  # it is not up again yet
                    await asyncio.sleep(0.05)
                else:
                    evidence.answers.append(answer)
                    break

    killers = [
        asyncio.create_task(_kill_gateways(stack, chaos, draw, evidence)),
        asyncio.create_task(_kill_redis(stack, chaos)),
    ]
    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    for killer in killers:
        killer.cancel()
    await asyncio.gather(*killers, return_exceptions=True)
    await _revive(stack)
    await settled(stack)
    return evidence


async def _kill_gateways(stack: LedgerStack, chaos: Chaos, draw: random.Random, evidence: Evidence) -> None:
    while True:
        await asyncio.sleep(draw.uniform(0.5, 1.5) * chaos.gateway_every_s)
        if not all([await gateway.service.spec.healthy() for gateway in stack.gateways]):
            continue  # or on a slow machine none would ever come up
        await _note_recorded(stack, evidence)
        gateway = draw.choice(stack.gateways)
        gateway.kill()
        try:
            await asyncio.sleep(0.2)
        finally:  # also when the requests end meanwhile: what it left in its journal waits for it
            gateway.service.launch()


async def _note_recorded(stack: LedgerStack, evidence: Evidence) -> None:
    async with Redis.from_url(stack.redis_url) as redis:
        for tenant in stack.tenants:
            try:
                values = await redis.hvals(f"{root_of(tenant)}:progress")  # type: ignore[misc]
            except RedisError:
                return  # it is away
            for value in values:
                fields = dict(zip(FIELDS, json.loads(value), strict=True))
                evidence.recorded[fields["id"]] = int(fields["output_tokens"])


async def _kill_redis(stack: LedgerStack, chaos: Chaos) -> None:
    while True:
        await asyncio.sleep(chaos.redis_every_s)
        stack.valkey.kill()
        try:
            await asyncio.sleep(chaos.redis_away_s)
        finally:
            stack.valkey.launch()


async def _revive(stack: LedgerStack) -> None:
    """Waits until Redis and all gateways answer. Raises TimeoutError with the log of one that does not."""
    deadline = time.monotonic() + _PATIENCE_S
    for service in (stack.valkey, *(gateway.service for gateway in stack.gateways)):
        while not await service.spec.healthy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{service.spec.name} does not answer: {service.log.read_text()[-2000:]}")
            await asyncio.sleep(0.05)


# ---- Redis is away ------------------------------------------------------------------------------------


async def outage(stack: LedgerStack, away_s: float, *, clients: int = 8) -> tuple[Evidence, list[int]]:
    """Keeps clients busy before, while and after Redis is away. Returns what there is to compare, but for the
    engines', and the statuses that a key that nobody had seen before got meanwhile.
    """
    evidence, strangers = Evidence([]), []
    ending = asyncio.Event()
    prompts = defaultdict(lambda: iter(range(1, 2000)))

    async def client(number: int) -> None:
        while not ending.is_set():
            tenant, gateway = stack.tenants[number % len(stack.tenants)], stack.gateways[number % 2]
            answer = await stack.ask(gateway, tenant, next(prompts[tenant]), max_tokens=20)
            evidence.answers.append(answer)

    running = [asyncio.create_task(client(number)) for number in range(clients)]
    await asyncio.sleep(1)
    stack.valkey.kill()
    back_at = time.monotonic() + away_s
    while time.monotonic() < back_at:
        for gateway in stack.gateways:
            unknown = await stack.ask(gateway, "nobody", 1, max_tokens=1, key="lpx_0123456789ab_" + "x" * 43)
            strangers.append(unknown.status)
        await asyncio.sleep(0.2)
    stack.valkey.launch()
    await asyncio.sleep(1)
    ending.set()
    await asyncio.gather(*running)
    await _revive(stack)
    await settled(stack)
    return evidence, strangers


# ---- the command --------------------------------------------------------------------------------------


def run_soak(folder: Path, requests: int, chaos: Chaos, *, tenants: int) -> Evidence:
    """Starts a stack, runs the requests over it while it dies, and returns all there is to compare."""
    stack = LedgerStack(folder, gateways=3, engines=2, tenants=tenants, step_s=0.005)
    try:
        stack.start()
        evidence = asyncio.run(soak(stack, requests, chaos))
        _finish(stack, evidence)
    finally:
        stack.stop()
    return evidence


def run_outage(folder: Path, away_s: float) -> tuple[Evidence, list[int]]:
    """Starts a stack, takes its Redis away once, and returns what `outage` does, complete."""
    stack = LedgerStack(folder, gateways=2, engines=1, tenants=4, step_s=0.005)
    try:
        stack.start()
        evidence, strangers = asyncio.run(outage(stack, away_s))
        _finish(stack, evidence)
    finally:
        stack.stop()
    return evidence, strangers


def _finish(stack: LedgerStack, evidence: Evidence) -> None:
    stack.stop_gateways()
    evidence.counted = stack.counted()
    asyncio.run(collect(stack, evidence))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the flags say; returns 1 when something does not add up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--outage-s", type=float, help="take Redis away for so long, and kill nothing else")
    options = parser.parse_args(argv)
    started = time.monotonic()
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.outage_s:
            evidence, strangers = run_outage(Path(folder), options.outage_s)
            document["unknown_keys"] = Counter(strangers)
        else:
            evidence = run_soak(Path(folder), options.requests, Chaos(), tenants=50)
        kills = {id(a.gateway): len(a.gateway.killed_at) for a in evidence.answers}
        document |= evidence.summary() | {"gateway_kills": sum(kills.values()), "lease_s": LEASE_S}
    faults = evidence.faults()
    document |= {"seconds": round(time.monotonic() - started, 1), "faults": faults}
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
