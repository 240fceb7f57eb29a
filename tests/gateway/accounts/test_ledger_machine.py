"""Random lives of a ledger, with crashes, lost answers, a Redis that is away or emptied, disks that fail and
reapers that are too early; against the plainest of models: of what is known of a request, the latest counts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from gateway.accounts import writer as writer_module
from gateway.accounts.entry import LedgerEntry, Outcome, Settlement
from gateway.accounts.journal import adopt
from gateway.accounts.settle import REAP, SEPARATOR, Kind, LedgerScript, Record
from gateway.accounts.windows import ADMIT, root_of
from gateway.accounts.writer import LedgerWriter

TENANTS = ("t1", "t2")
ADAPTERS = ("", "sql", "acme/sql")
ARRIVAL = 1_796_000_000_000
ASK = {
    "lease": 60_000,
    "window": 60_000,
    "limits": [
        ["tenant", "tokens_per_month", 10**12, 50],
        ["tenant", "output_tokens_per_minute", 10**12, 40],
        ["key:k", "concurrent_requests", 10**6, 1],
    ],
}


class UnreliableScript(LedgerScript):
    """The real one, but for how the network is. Remembers what Redis carried out since it was emptied."""

    network = "well"  # or "away", or "mute": carried out, and the answer is lost

    def __init__(self, redis: Redis, carried_out: list[tuple[str, Record]]) -> None:
        super().__init__(redis, lease_ms=60_000)
        self._carried_out = carried_out

    async def apply(self, writer: str, records: Sequence[Record]) -> list[str]:
        if self.network == "away":
            raise ConnectionError("Redis is away")
        faults = await super().apply(writer, records)
        self._carried_out += [(writer, record) for record in records]
        assert faults == []
        if self.network == "mute":
            raise TimeoutError("no answer")
        return faults


@dataclass
class Gateway:
    """A gateway as far as the ledger goes, and its requests that have not ended."""

    script: UnreliableScript
    writer: LedgerWriter
    running: dict[str, LedgerEntry] = field(default_factory=dict)


class LedgerMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.redis = redis.Redis.from_url(self.url, decode_responses=True)
        self.redis.flushall()
        self.async_redis = Redis.from_url(self.url)
        self.folder = tempfile.TemporaryDirectory()
        self.journals = Path(self.folder.name) / "journal"
        self.carried_out: list[tuple[str, Record]] = []
        self.admitted: set[str] = set()  # since Redis was emptied
        self.openings: dict[str, str] = {}
        self.entries: dict[str, LedgerEntry] = {}
        self.writer_of: dict[str, str] = {}
        self.ended: set[str] = set()
        self.names = itertools.count()
        self.gateways = [self.new_gateway(), self.new_gateway()]

    def new_gateway(self) -> Gateway:
        script = UnreliableScript(self.async_redis, self.carried_out)
        return Gateway(script, LedgerWriter(script, self.journals))

    def step(self, gateway: Gateway) -> None:
        self.loop.run_until_complete(gateway.writer._step())

    def admit(self, entry: LedgerEntry) -> None:
        wire = self.openings[entry.id]
        self.redis.eval(ADMIT, 1, root_of(entry.tenant), entry.id, json.dumps(ASK), wire)
        self.admitted.add(entry.id)

    # ---- what happens ---------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 1),
        tenant=st.sampled_from(TENANTS),
        adapter=st.sampled_from(ADAPTERS),
        admitted=st.sampled_from(["known", "unknown", "not"]),
    )
    def begin(self, which: int, tenant: str, adapter: str, admitted: str) -> None:
        gateway = self.gateways[which]
        number = next(self.names)
        entry = LedgerEntry(f"r{number}", ARRIVAL + number * 40_000_000, tenant, "k", "m", adapter)
        self.entries[entry.id], self.openings[entry.id] = entry, entry.to_wire()
        self.writer_of[entry.id] = gateway.writer.name
        gateway.running[entry.id] = entry
        if admitted != "not":
            self.admit(entry)
        if admitted != "known":
            gateway.writer.progress(entry)

    @precondition(lambda self: any(gateway.running for gateway in self.gateways))
    @rule(data=st.data(), more=st.integers(0, 9), end=st.sampled_from([None, *Outcome]), urgent=st.booleans())
    def go_on(self, data: st.DataObject, more: int, end: Outcome | None, urgent: bool) -> None:
        gateway = data.draw(st.sampled_from([each for each in self.gateways if each.running]))
        entry = gateway.running[data.draw(st.sampled_from(sorted(gateway.running)))]
        output = entry.output_tokens + more
        entry.settle(Settlement(end or Outcome.LOST, 7, 3, output, output * 2, engine="e"))
        if end:
            del gateway.running[entry.id]
            self.ended.add(entry.id)
            gateway.writer.end(entry, urgent=urgent)
        else:
            gateway.writer.progress(entry)

    @rule(which=st.integers(0, 1))
    def write(self, which: int) -> None:
        self.step(self.gateways[which])

    @rule(which=st.integers(0, 1), network=st.sampled_from(["well", "well", "away", "mute"]))
    def change_network(self, which: int, network: str) -> None:
        self.gateways[which].script.network = network

    @rule(which=st.integers(0, 1))
    def fill_disk(self, which: int) -> None:
        """The next append to the journal fails."""
        writer = self.gateways[which].writer
        append = writer._append

        def fail(batch: Sequence[Record]) -> None:
            writer._append = append
            raise OSError(28, "No space left on device")

        writer._append = fail

    @rule(which=st.integers(0, 1), torn=st.booleans())
    def crash(self, which: int, torn: bool) -> None:
        journal = self.gateways[which].writer._journal
        if journal is not None:
            if torn:
                os.pwrite(journal._descriptor, b'[7, "t1", "end", "[\\"r', journal._end)
            os.close(journal._descriptor)  # as the kernel does, and frees the lock
        self.gateways[which] = self.new_gateway()

    @rule(network=st.sampled_from(["well", "away", "mute"]))
    def adopt_journals(self, network: str) -> None:
        adopter = self.new_gateway()
        adopter.script.network = network
        self.adopt(adopter.writer)

    def adopt(self, writer: LedgerWriter) -> None:
        for journal in adopt(self.journals):
            try:
                self.loop.run_until_complete(writer.replay(journal))
            except OSError:
                assert writer._script.network != "well"  # type: ignore[attr-defined]
            finally:
                journal.close()

    @rule(tenant=st.sampled_from(TENANTS), share=st.integers(1, 3))
    def reap(self, tenant: str, share: int) -> None:
        """Leases run out, some of them of requests whose gateway lives."""
        leases = root_of(tenant) + ":leases"
        held: Any = self.redis.zrange(leases, 0, -1)
        for request in sorted(held)[::share]:
            self.redis.zadd(leases, {request: 1})
        self.redis.eval(REAP, 1, root_of(tenant), self.now_ms())

    def now_ms(self) -> int:
        seconds, micros = self.redis.time()
        return seconds * 1000 + micros // 1000

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def admit_late(self, data: st.DataObject) -> None:
        """A message that hung in the network is carried out long after its sender gave up on it."""
        self.admit(self.entries[data.draw(st.sampled_from(sorted(self.ended or self.entries)))])

    @rule()
    def empty_redis(self) -> None:
        self.redis.flushall()
        self.carried_out.clear()
        self.admitted.clear()

    # ---- what holds -----------------------------------------------------------------------------------

    @invariant()
    def every_request_is_there_once_at_most_and_sums_agree(self) -> None:
        for tenant in TENANTS:
            found = self.ledger(tenant)
            assert len({entry.id for entry in found}) == len(found)
            assert self.sums(tenant) == sums_of(found)

    def teardown(self) -> None:
        try:
            self.settle_all()
        finally:
            self.loop.run_until_complete(self.async_redis.aclose())
            self.loop.close()
            self.redis.close()
            self.folder.cleanup()

    def settle_all(self) -> None:
        expected = self.latest_known()
        for gateway in self.gateways:
            gateway.script.network = "well"
            for entry in list(gateway.running.values()):
                entry.settle(Settlement(Outcome.COMPLETED, 7, 3, entry.output_tokens + 1, 1))
                gateway.writer.end(entry)
                expected[entry.id] = entry.to_wire()
            while gateway.writer.waiting:
                self.step(gateway)
        self.adopt(self.gateways[0].writer)
        for tenant in TENANTS:
            self.reap(tenant, 1)
            found = self.ledger(tenant)
            assert {entry.id: entry.to_wire() for entry in found} == {
                request: wire for request, wire in expected.items() if self.entries[request].tenant == tenant
            }
            self.nothing_is_held(tenant, found)

    def latest_known(self) -> dict[str, str]:
        """By request, the latest that Redis, a journal or a living gateway's memory knows of it."""
        known: dict[str, tuple[int, Kind, str]] = {
            request: (0, Kind.PROGRESS, self.openings[request]) for request in self.admitted
        }
        records = [*self.carried_out, *lines_of(self.journals)]
        for gateway in self.gateways:
            records += [(gateway.writer.name, record) for record in gateway.writer._records]
        for writer, record in records:
            request = json.loads(record.entry)[0]
            assert self.writer_of[request] == writer
            if record.number > known.get(request, (-1,))[0]:
                known[request] = record.number, record.kind, record.entry
        return {
            request: wire if kind is Kind.END else lost(wire) for request, (_, kind, wire) in known.items()
        }

    def nothing_is_held(self, tenant: str, found: Sequence[LedgerEntry]) -> None:
        root = root_of(tenant)
        for key in (":open", ":progress", ":leases", ":leases:key:k"):
            assert not self.redis.exists(root + key), key
        months = {key: int(self.redis.get(key) or 0) for key in self.redis.keys(root + ":month:*")}
        spent = sum(entry.input_tokens + entry.output_tokens for entry in found)
        assert sum(months.values()) == spent

    def ledger(self, tenant: str) -> list[LedgerEntry]:
        stream: Any = self.redis.xrange(root_of(tenant) + ":ledger")
        return [LedgerEntry.from_fields(fields) for _, fields in stream]

    def sums(self, tenant: str) -> Counter[str]:
        found: Counter[str] = Counter()
        keys: Any = self.redis.keys(root_of(tenant) + ":usage:*")
        for key in keys:
            day = key.rpartition(":")[2]
            values: Any = self.redis.hgetall(key)
            found.update({f"{day} {name}": int(value) for name, value in values.items() if value != "0"})
        return found


def sums_of(entries: Sequence[LedgerEntry]) -> Counter[str]:
    """What the aggregates must say of these entries."""
    sums: Counter[str] = Counter()
    for entry in entries:
        day = datetime.fromtimestamp(entry.time / 1000, UTC).date()
        values = {
            "requests": 1,
            "errors": int(entry.outcome not in (Outcome.COMPLETED, Outcome.DISCONNECTED)),
            "input_tokens": entry.input_tokens,
            "cached_tokens": entry.cached_tokens,
            "output_tokens": entry.output_tokens,
        }
        for name, value in values.items():
            sums[f"{day} {entry.adapter}{SEPARATOR}{entry.key}{SEPARATOR}{name}"] += value
    return +sums


def lines_of(folder: Path) -> list[tuple[str, Record]]:
    """All records that lie on the disk, by writer."""
    found = []
    for path in folder.glob("*.journal"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                number, tenant, kind, entry = json.loads(line)
                found.append((path.stem, Record(number, tenant, Kind(kind), entry)))
    return found


def lost(wire: str) -> str:
    values = json.loads(wire)
    values[-1] = "lost"
    return json.dumps(values, separators=(",", ":"))


def test_every_request_is_in_the_ledger_once_whatever_happens(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.0)
    monkeypatch.setattr(LedgerMachine, "url", valkey_url)
    machine: Callable[[], LedgerMachine] = LedgerMachine
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
