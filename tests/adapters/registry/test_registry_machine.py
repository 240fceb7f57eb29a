"""The registry against a model of it in plain Python: any verbs in any order, on a real server.

After each verb everything that the registry says is compared: what names mean to each tenant, what is listed,
references by digest, bytes, pins and grants. At the end a Redis that was lost is rebuilt from records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis

from adapters.model_ref import ModelRef
from adapters.registry import AdapterConflict, AdapterNotFound, Registry
from adapters.registry.desired import desired_adapters
from tests.adapters.registry.builders import digest, summary

T = TypeVar("T")

TENANTS = ("acme", "globex")
NAMES = ("a", "b", "c")
CONTENTS = ("one", "three", "seven")
QUOTA = 2

# Most verbs meet one name, so that its life is long enough for everything to happen to it.
keys = st.sampled_from([*[("acme", "a")] * 6, *[("acme", "b")] * 2, ("acme", "c"), ("globex", "a")])
tenants = st.sampled_from(TENANTS)
names = st.sampled_from(NAMES)
picks = st.integers(0, 3)
"""Which of a name's versions; the last pick is none."""
chances = st.integers(0, 4)
"""What would end a name's life happens for 0 only."""


@dataclass
class Name:
    """What the model knows of one name."""

    versions: dict[int, str] = field(default_factory=dict)
    """Number → content."""
    live: int = 0
    past: list[int] = field(default_factory=list)
    canary: tuple[int, float] | None = None
    pinned: bool = False
    grants: set[str] = field(default_factory=set)

    def make_live(self, version: int, *, remember: bool = True) -> None:
        self.canary = None
        if version != self.live and self.live and remember:
            self.past.append(self.live)
        self.live = version


class Refused(Exception):
    """The model's word for either of the registry's refusals."""


@dataclass
class Model:
    names: dict[tuple[str, str], Name] = field(default_factory=dict)
    last: dict[tuple[str, str], int] = field(default_factory=dict)
    moved: dict[tuple[str, str], str] = field(default_factory=dict)

    def found(self, tenant: str, name: str) -> Name:
        if (tenant, name) not in self.names:
            raise Refused
        return self.names[tenant, name]

    def add(self, tenant: str, name: str, content: str, promote: bool) -> int:
        key = (tenant, name)
        version = self.last[key] = self.last.get(key, 0) + 1
        self.moved.pop(key, None)
        entry = self.names.setdefault(key, Name())
        entry.versions[version] = content
        if promote:
            entry.make_live(version)
        return version

    def promote(self, tenant: str, name: str, version: int | None) -> int:
        entry = self.found(tenant, name)
        chosen = version or (entry.canary[0] if entry.canary else max(entry.versions))
        if chosen not in entry.versions:
            raise Refused
        entry.make_live(chosen)
        return chosen

    def rollback(self, tenant: str, name: str) -> int:
        entry = self.found(tenant, name)
        while entry.past and entry.past[-1] == entry.live:
            entry.past.pop()
        if not entry.past:
            raise Refused
        entry.make_live(entry.past.pop(), remember=False)
        return entry.live

    def canary(self, tenant: str, name: str, version: int, percent: float) -> None:
        entry = self.found(tenant, name)
        if version not in entry.versions or not entry.live or entry.live == version:
            raise Refused
        entry.canary = (version, percent)

    def pin(self, tenant: str, name: str) -> None:
        entry = self.found(tenant, name)
        pins = sum(other.pinned for (owner, _), other in self.names.items() if owner == tenant)
        if not entry.live or (pins >= QUOTA and not entry.pinned):
            raise Refused
        entry.pinned = True

    def delete(self, tenant: str, name: str) -> None:
        self.found(tenant, name)
        del self.names[tenant, name]

    def delete_version(self, tenant: str, name: str, version: int) -> None:
        entry = self.found(tenant, name)
        in_use = {entry.live, entry.canary[0] if entry.canary else 0}
        if version not in entry.versions or version in in_use:
            raise Refused
        del entry.versions[version]
        entry.past = [number for number in entry.past if number != version]
        if not entry.versions:
            del self.names[tenant, name]

    def rename(self, tenant: str, name: str, target: str) -> None:
        entry, key, to = self.found(tenant, name), (tenant, name), (tenant, target)
        if to in self.names or (to in self.last and self.moved.get(to) != name):
            raise Refused
        del self.names[key]
        self.names[to] = entry
        self.last[to] = self.last[key]
        for former, current in list(self.moved.items()):
            if former[0] == tenant and current == name:
                self.moved[former] = target
        self.moved.pop(to, None)
        self.moved[key] = target

    def references(self, tenant: str | None = None) -> dict[str, int]:
        counts: dict[str, int] = {}
        for (owner, _), entry in self.names.items():
            for content in entry.versions.values() if tenant in (None, owner) else ():
                counts[content] = counts.get(content, 0) + 1
        return counts


class RegistryMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        with redis.Redis.from_url(self.url) as server:
            server.flushall()
        self.loop = asyncio.new_event_loop()
        self.redis = Redis.from_url(self.url, decode_responses=True)
        self.registry = Registry(self.redis)
        self.model = Model()

    def run(self, call: Awaitable[T]) -> T:
        return self.loop.run_until_complete(call)

    def number(self, key: tuple[str, str], pick: int) -> int:
        """The number of one of the name's versions, or one that it has not."""
        entry = self.model.names.get(key)
        return dict(enumerate(sorted(entry.versions, reverse=True) if entry else ())).get(pick, 99)

    def both(self, expected: Callable[[], object], actual: Awaitable[object]) -> None:
        """Both do the same, or both refuse."""
        try:
            answer = expected()
        except Refused:
            with pytest.raises((AdapterNotFound, AdapterConflict)):
                self.run(actual)
            return
        found = self.run(actual)
        if answer is not None:
            assert getattr(found, "version", None) == answer

    @rule(key=keys, content=st.sampled_from(CONTENTS), promote=st.booleans())
    def upload(self, key: tuple[str, str], content: str, promote: bool) -> None:
        self.both(
            lambda: self.model.add(*key, content, promote),
            self.registry.add_version(*key, summary(content), promote=promote),
        )

    @rule(key=keys, contents=st.lists(st.sampled_from(CONTENTS), min_size=2, max_size=3))
    def upload_at_once(self, key: tuple[str, str], contents: list[str]) -> None:
        """They get a number each, in some order, and the last one is live."""

        async def both() -> list[tuple[int, str]]:
            calls = (self.registry.add_version(*key, summary(content)) for content in contents)
            added = await asyncio.gather(*calls)
            return sorted((item.version, content) for item, content in zip(added, contents, strict=True))

        for version, content in self.run(both()):
            assert self.model.add(*key, content, True) == version

    @rule(key=keys, pick=st.none() | picks)
    def promote(self, key: tuple[str, str], pick: int | None) -> None:
        version = None if pick is None else self.number(key, pick)
        self.both(
            lambda: self.model.promote(*key, version),
            self.registry.aliases.promote(*key, version),
        )

    @rule(key=keys)
    def rollback(self, key: tuple[str, str]) -> None:
        self.both(lambda: self.model.rollback(*key), self.registry.aliases.rollback(*key))

    @rule(key=keys, pick=picks, percent=st.sampled_from((0.5, 50.0)))
    def canary(self, key: tuple[str, str], pick: int, percent: float) -> None:
        version = self.number(key, pick)
        self.both(
            lambda: self.model.canary(*key, version, percent),
            self.registry.aliases.canary(*key, version, percent),
        )

    @rule(key=keys)
    def end_canary(self, key: tuple[str, str]) -> None:
        def expected() -> None:
            self.model.found(*key).canary = None

        self.both(expected, self.registry.aliases.end_canary(*key))

    @rule(key=keys)
    def pin(self, key: tuple[str, str]) -> None:
        self.both(lambda: self.model.pin(*key), self.registry.aliases.pin(*key, quota=QUOTA))

    @rule(key=keys)
    def unpin(self, key: tuple[str, str]) -> None:
        def expected() -> None:
            self.model.found(*key).pinned = False

        self.both(expected, self.registry.aliases.unpin(*key))

    @rule(key=keys, grantee=tenants)
    def grant(self, key: tuple[str, str], grantee: str) -> None:
        self.both(
            lambda: self.model.found(*key).grants.add(grantee),
            self.registry.grants.grant(*key, grantee),
        )

    @rule(key=keys, grantee=tenants)
    def revoke(self, key: tuple[str, str], grantee: str) -> None:
        self.both(
            lambda: self.model.found(*key).grants.discard(grantee),
            self.registry.grants.revoke(*key, grantee),
        )

    @rule(key=keys, chance=chances)
    def delete(self, key: tuple[str, str], chance: int) -> None:
        if not chance:
            self.both(lambda: self.model.delete(*key), self.registry.delete(*key))

    @rule(key=keys, pick=picks)
    def delete_version(self, key: tuple[str, str], pick: int) -> None:
        version = self.number(key, pick)
        self.both(
            lambda: self.model.delete_version(*key, version),
            self.registry.delete_version(*key, version),
        )

    @rule(key=keys, new_name=names, chance=chances)
    def rename(self, key: tuple[str, str], new_name: str, chance: int) -> None:
        if not chance:
            self.both(lambda: self.model.rename(*key, new_name), self.registry.rename(*key, new_name))

    @rule()
    def lose_redis(self) -> None:
        """What the records say is all that there was."""

        async def rebuild() -> None:
            records = [await self.registry.records.export(t, n) for t, n in self.model.last]
            await self.redis.flushall()
            for record in records:
                assert await self.registry.records.restore(record)

        self.run(rebuild())

    @invariant()
    def names_mean_what_they_should(self) -> None:
        self.run(self._check_names())

    @invariant()
    def references_and_bytes_are_exact(self) -> None:
        self.run(self._check_references())

    async def _check_names(self) -> None:
        for tenant in TENANTS:
            listed = {item.name: item for item in await self.registry.list(tenant)}
            assert set(listed) == {name for owner, name in self.model.names if owner == tenant}
            for name in NAMES:
                entry = self.model.names.get((tenant, name))
                shown = await self.registry.show(tenant, name)
                assert (shown is None) == (entry is None)
                if entry is None or shown is None:
                    continue
                assert {item.version: item.digest for item in shown.versions} == {
                    version: digest(content) for version, content in entry.versions.items()
                }
                for item in (shown, listed[name]):
                    assert (item.live.version if item.live else 0) == entry.live
                    assert item.pinned == entry.pinned
                    canary = (item.canary_version, item.canary_percent) if item.canary_version else None
                    assert canary == entry.canary
                assert shown.grants == tuple(sorted(entry.grants))
        for caller in TENANTS:
            refs = ((caller, owner, name) for owner in TENANTS for name in NAMES)
            await asyncio.gather(*(self._check_reference(*ref) for ref in refs))
            granted = {
                key for key, entry in self.model.names.items() if caller in entry.grants and entry.live
            }
            found = await self.registry.grants.granted_to(caller)
            assert {(item.tenant, item.name) for item in found} == granted

    async def _check_reference(self, caller: str, owner: str, name: str) -> None:
        entry = self.model.names.get((owner, name))
        visible = entry is not None and (caller == owner or caller in entry.grants)
        refs = [ModelRef(name, number, owner=owner) for number in (None, 1, 2)]
        bare, *numbered = await asyncio.gather(*(self.registry.resolve(caller, ref) for ref in refs))
        assert (bare is not None) == visible
        if bare is not None and entry is not None:
            assert (bare.live.version if bare.live else 0) == entry.live
            canary = (bare.canary.version.version, bare.canary.percent) if bare.canary else None
            assert canary == entry.canary
        for number, found in enumerate(numbered, start=1):
            assert (found is not None) == (visible and entry is not None and number in entry.versions)

    async def _check_references(self) -> None:
        counts = {digest(content).hex(): count for content, count in self.model.references().items()}
        assert await self.redis.hgetall("loraplex:{adapters}:references") == {
            content: str(count) for content, count in counts.items()
        }
        unreferenced = {found.hex() for found in await self.registry.references.unreferenced(0)}
        assert not unreferenced & set(counts)
        for tenant in TENANTS:
            own = self.model.references(tenant)
            assert await self.registry.bytes_of(tenant) == sum(map(len, own))
            for content in CONTENTS:
                assert await self.registry.tenant_refers(tenant, digest(content)) == (content in own)
        pins = {digest(entry.versions[entry.live]) for entry in self.model.names.values() if entry.pinned}
        assert (await desired_adapters(self.redis, [])).pinned == pins

    def teardown(self) -> None:
        async def delete_all() -> None:
            for tenant, name in list(self.model.names):
                await self.registry.delete(tenant, name)
            assert await self.redis.hlen("loraplex:{adapters}:references") == 0
            for tenant in TENANTS:
                assert await self.registry.bytes_of(tenant) == 0
                await self.registry.forget_tenant(tenant)
            left = {str(key).removeprefix("loraplex:{adapters}:") for key in await self.redis.keys()}
            assert left <= {"unreferenced", "unrecorded"}, left
            await self.redis.aclose()

        self.run(delete_all())
        self.loop.close()


def test_the_registry_does_what_the_model_does(valkey_url: str) -> None:
    machine = type("BoundMachine", (RegistryMachine,), {"url": valkey_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
