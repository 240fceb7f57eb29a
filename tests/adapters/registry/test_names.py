from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from adapters.identity import InvalidName
from adapters.model_ref import ModelRef
from adapters.registry import AdapterConflict, AdapterNotFound, Registry
from adapters.registry.names import MOST_FORMER_NAMES
from adapters.registry.scripts import MOST_VERSIONS, REFERENCES, key, text
from tests.adapters.registry.builders import ONE, THREE, TWO, meaning, summary


async def test_an_upload_is_a_version_and_the_name_means_it(registry: Registry) -> None:
    begun = int(time.time())
    first = await registry.add_version("acme", "sql", ONE)
    assert (first.tenant, first.name, first.version, first.ref) == ("acme", "sql", 1, "sql@1")
    assert (first.digest, first.rank, first.nbytes) == (ONE.digest, 16, 3)
    assert (first.target_modules, first.base_model) == (("q_proj", "down_proj"), "base/model")
    assert begun <= first.created_at <= time.time()
    second = await registry.add_version("acme", "sql", TWO)
    assert await meaning(registry, "acme", "sql") == second
    assert await meaning(registry, "acme", "sql@live") == second
    assert await meaning(registry, "acme", "sql@1") == first
    assert await meaning(registry, "acme", "sql@2") == second
    assert await meaning(registry, "acme", "sql@3") is None
    shown = await registry.show("acme", "sql")
    assert shown is not None and (shown.live, shown.newest) == (second, second)
    assert shown.versions == (first, second)


async def test_all_that_a_summary_says_is_kept(registry: Registry) -> None:
    said = replace(ONE, invocation_tokens=(5, 6), tokenizer="ab" * 32, vocab_size=50)
    added = await registry.add_version("acme", "sql", said)
    assert (added.invocation_tokens, added.tokenizer, added.vocab_size) == ((5, 6), "ab" * 32, 50)
    assert await meaning(registry, "acme", "sql") == added


async def test_a_record_of_before_is_read(registry: Registry, redis: Redis) -> None:
    added = await registry.add_version("acme", "sql", ONE)
    key = "loraplex:{adapters}:versions:acme:sql"
    record = json.loads(await redis.hget(key, "1") or "")
    for field in ("invocation_tokens", "tokenizer", "vocab_size"):
        del record[field]
    await redis.hset(key, "1", json.dumps(record))
    assert await meaning(registry, "acme", "sql") == added


async def test_a_staged_version_is_there_by_its_number_alone(registry: Registry) -> None:
    staged = await registry.add_version("acme", "sql", ONE, promote=False)
    assert await meaning(registry, "acme", "sql@1") == staged
    for ref in ("sql", "sql@live"):
        found = await registry.resolve("acme", ModelRef("sql", live_only=ref != "sql"))
        assert found is not None and found.live is None and found.choose("acme", None) is None
    [listed] = await registry.list("acme")
    assert (listed.live, listed.newest) == (None, staged)
    live = await registry.add_version("acme", "sql", TWO)
    later = await registry.add_version("acme", "sql", THREE, promote=False)
    assert await meaning(registry, "acme", "sql") == live
    shown = await registry.show("acme", "sql")
    assert shown is not None and (shown.live, shown.newest) == (live, later)


async def test_what_is_not_there(registry: Registry) -> None:
    assert await meaning(registry, "acme", "sql") is None
    assert await meaning(registry, "acme", "sql@1") is None
    assert await registry.show("acme", "sql") is None
    assert await registry.list("acme") == []
    assert await registry.history("acme", "sql") == []
    for call in (
        registry.delete("acme", "sql"),
        registry.delete_version("acme", "sql", 1),
        registry.rename("acme", "sql", "other"),
    ):
        with pytest.raises(AdapterNotFound, match=r"There is no adapter 'sql(@1)?'\."):
            await call
    assert not await registry.references.is_needed(ONE.digest)


async def test_two_tenants_of_one_name(registry: Registry) -> None:
    mine = await registry.add_version("acme", "sql", ONE)
    theirs = await registry.add_version("globex", "sql", TWO)
    assert await meaning(registry, "acme", "sql") == mine
    assert await meaning(registry, "globex", "sql") == theirs
    assert await meaning(registry, "initech", "sql") is None
    assert await registry.delete("acme", "sql") == [ONE.digest]
    assert await meaning(registry, "globex", "sql") == theirs


async def test_lists_names_in_order_with_their_live_versions(registry: Registry) -> None:
    await registry.add_version("acme", "b", ONE)
    b = await registry.add_version("acme", "b", TWO)
    a = await registry.add_version("acme", "a", ONE)
    assert [item.live for item in await registry.list("acme")] == [a, b]


async def test_very_many_names_are_listed_in_parts(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a tenant that lists thousands keeps nobody else from Redis for long."""
    count = 2000
    for first in range(0, count, 50):
        names = [f"a{number}" for number in range(first, first + 50)]
        await asyncio.gather(*(registry.add_version("acme", name, summary(name)) for name in names))
    parts: list[int] = []
    ask = registry._list

    async def counted(*args: str) -> Any:
        reply = await ask(*args)
        parts.append(len(reply) - 1)
        return reply

    monkeypatch.setattr(registry, "_list", counted)
    listed = await registry.list("acme")
    assert [item.name for item in listed] == sorted(f"a{number}" for number in range(count))
    assert all(item.live == item.newest for item in listed)
    assert max(parts) <= count / 4


async def test_versions_are_in_the_order_of_numbers(registry: Registry) -> None:
    for number in range(11):
        await registry.add_version("acme", "sql", summary(str(number)))
    shown = await registry.show("acme", "sql")
    assert shown is not None and [item.version for item in shown.versions] == list(range(1, 12))


async def test_a_number_is_never_given_twice(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("acme", "sql", ONE)
    await registry.delete("acme", "sql")
    assert await meaning(registry, "acme", "sql@1") is None
    assert (await registry.add_version("acme", "sql", TWO)).version == 3
    assert await meaning(registry, "acme", "sql@2") is None


async def test_a_name_with_as_many_versions_as_there_may_be_is_deleted(
    registry: Registry, redis: Redis
) -> None:
    await registry.add_version("acme", "sql", ONE)
    record = text(await redis.hget(key("versions", "acme", "sql"), "1") or "")
    assert ONE.digest.hex() in record
    records: dict[Any, Any] = {}
    digests = [hashlib.sha256(str(number).encode()).digest() for number in range(2, MOST_VERSIONS + 1)]
    for number, digest in enumerate(digests, 2):
        records[str(number)] = record.replace(ONE.digest.hex(), digest.hex())
    await redis.hset(key("versions", "acme", "sql"), mapping=records)
    for counts in (REFERENCES, key("holdings", "acme")):
        await redis.hset(counts, mapping=dict.fromkeys((digest.hex() for digest in digests), 1))
    deleted = await registry.delete("acme", "sql")
    assert len(deleted) == MOST_VERSIONS and set(deleted) == {ONE.digest, *digests}
    assert await registry.show("acme", "sql") is None
    assert set(await registry.references.unreferenced(0)) == set(deleted)


async def test_delete_returns_what_nobody_refers_to(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("acme", "sql", TWO)
    await registry.add_version("acme", "other", TWO)
    await registry.add_version("globex", "x", THREE)
    assert await registry.delete("acme", "sql") == [ONE.digest]
    assert not await registry.references.is_needed(ONE.digest)
    assert await registry.references.is_needed(TWO.digest)
    assert await registry.delete("acme", "other") == [TWO.digest]


async def test_one_version_is_deleted_unless_it_is_in_use(registry: Registry) -> None:
    for content in ("one", "two", "three"):
        await registry.add_version("acme", "sql", summary(content))
    await registry.aliases.canary("acme", "sql", 2, 10)
    with pytest.raises(AdapterConflict, match="sql@3 is the live version") as live:
        await registry.delete_version("acme", "sql", 3)
    with pytest.raises(AdapterConflict, match="End the canary first") as canary:
        await registry.delete_version("acme", "sql", 2)
    assert (live.value.code, canary.value.code) == ("version_is_live", "version_is_canary")
    assert await registry.delete_version("acme", "sql", 1) == [ONE.digest]
    assert await meaning(registry, "acme", "sql@1") is None
    await registry.aliases.end_canary("acme", "sql")
    assert await registry.delete_version("acme", "sql", 2) == [TWO.digest]
    with pytest.raises(AdapterConflict, match="was live before"):
        await registry.aliases.rollback("acme", "sql")


async def test_the_last_staged_version_takes_its_name_along(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE, promote=False)
    await registry.grants.grant("acme", "sql", "globex")
    assert await registry.delete_version("acme", "sql", 1) == [ONE.digest]
    assert await registry.show("acme", "sql") is None
    await registry.add_version("acme", "sql", TWO)
    assert await meaning(registry, "globex", "acme/sql") is None


async def test_bytes_of_one_digest_count_once_for_each_tenant(registry: Registry) -> None:
    await registry.add_version("acme", "a", THREE)
    await registry.add_version("acme", "b", THREE)
    await registry.add_version("acme", "b", ONE)
    await registry.add_version("globex", "x", THREE)
    assert (await registry.bytes_of("acme"), await registry.bytes_of("globex")) == (8, 5)
    assert await registry.tenant_refers("globex", THREE.digest)
    assert not await registry.tenant_refers("globex", ONE.digest)
    await registry.delete("acme", "b")
    assert await registry.bytes_of("acme") == 5
    await registry.delete("acme", "a")
    assert await registry.bytes_of("acme") == 0
    assert not await registry.tenant_refers("acme", THREE.digest)


async def test_a_rename_takes_everything_along(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("acme", "sql", TWO)
    await registry.add_version("acme", "sql", THREE, promote=False)
    await registry.aliases.canary("acme", "sql", 3, 25)
    await registry.aliases.pin("acme", "sql", quota=1)
    await registry.grants.grant("acme", "sql", "globex")
    before = await registry.show("acme", "sql")
    await registry.rename("acme", "sql", "new")
    after = await registry.show("acme", "new")
    assert before is not None and after is not None and before.live is not None
    assert after.live == replace(before.live, name="new")
    assert (after.canary_version, after.canary_percent, after.pinned) == (3, 25, True)
    assert [item.version for item in after.versions] == [1, 2, 3]
    assert await registry.show("acme", "sql") is None and await meaning(registry, "acme", "sql@1") is None
    assert await meaning(registry, "globex", "acme/sql") is None
    assert await meaning(registry, "globex", "acme/new") == after.live
    assert (await registry.aliases.rollback("acme", "new")).version == 1
    assert (await registry.add_version("acme", "new", ONE)).version == 4
    assert (await registry.add_version("acme", "sql", ONE)).version == 4
    events = [(event.action, event.detail) for event in await registry.history("acme", "new")]
    assert ("rename", "sql") in events and events[-1] == ("upload", "live")


async def test_a_rename_never_gives_a_number_another_meaning(registry: Registry) -> None:
    for name in ("a", "b", "gone"):
        await registry.add_version("acme", name, ONE)
    await registry.delete("acme", "gone")
    with pytest.raises(AdapterConflict, match="There is an adapter 'b' already") as taken:
        await registry.rename("acme", "a", "b")
    with pytest.raises(AdapterConflict, match="'gone' has had versions before") as used:
        await registry.rename("acme", "a", "gone")
    assert (taken.value.code, used.value.code) == ("name_taken", "name_used")
    with pytest.raises(InvalidName):
        await registry.rename("acme", "a", "A")


async def test_former_names_are_bounded_since_each_rename_looks_through_them(
    registry: Registry, redis: Redis
) -> None:
    await registry.add_version("acme", "a", ONE)
    await registry.rename("acme", "a", "b")
    former = {f"former-{number}": "gone" for number in range(MOST_FORMER_NAMES - 1)}
    await redis.hset("loraplex:{adapters}:moved:acme", mapping=former)  # type: ignore[misc]
    with pytest.raises(AdapterConflict, match="10000 former names") as caught:
        await registry.rename("acme", "b", "c")
    assert caught.value.code == "too_many_renames"
    await registry.rename("acme", "b", "a")
    await registry.add_version("globex", "a", ONE)
    await registry.rename("globex", "a", "b")


async def test_a_rename_can_be_undone(registry: Registry) -> None:
    first = await registry.add_version("acme", "a", ONE)
    for source, target in (("a", "b"), ("b", "c"), ("c", "a"), ("a", "b"), ("b", "a")):
        await registry.rename("acme", source, target)
    assert await meaning(registry, "acme", "a@1") == first
    await registry.rename("acme", "a", "b")
    await registry.add_version("acme", "a", TWO)
    await registry.delete("acme", "a")
    with pytest.raises(AdapterConflict, match="had versions before"):
        await registry.rename("acme", "b", "a")


async def test_uploads_at_once_yield_as_many_versions(registry: Registry) -> None:
    added = await asyncio.gather(*(registry.add_version("acme", "sql", summary(str(i))) for i in range(50)))
    assert sorted(item.version for item in added) == list(range(1, 51))
    for item in added:
        assert await meaning(registry, "acme", item.ref) == item
    live = await meaning(registry, "acme", "sql")
    assert live is not None and live.version == 50


async def test_deletes_at_once_count_each_reference_once(registry: Registry) -> None:
    for name in ("a", "b", "c"):
        await registry.add_version("acme", name, ONE)
    calls = (registry.delete("acme", name) for name in "aabbcc")
    freed = await asyncio.gather(*calls, return_exceptions=True)
    digests = [digest for answer in freed if not isinstance(answer, BaseException) for digest in answer]
    assert digests == [ONE.digest]
    assert sum(isinstance(answer, AdapterNotFound) for answer in freed) == 3


async def test_what_stays_after_a_delete(registry: Registry, redis: Redis) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("acme", "sql", TWO, promote=False)
    await registry.aliases.canary("acme", "sql", 2, 10)
    await registry.aliases.pin("acme", "sql", quota=1)
    await registry.grants.grant("acme", "sql", "globex")
    assert all(key.startswith("loraplex:{adapters}:") for key in await _keys(redis))
    await registry.delete("acme", "sql")
    stays = {"last:acme", "revision:acme", "bytes", "unreferenced", "unrecorded"}
    assert {key.removeprefix("loraplex:{adapters}:") for key in await _keys(redis)} == stays
    await registry.forget_tenant("acme")
    stays = {"unreferenced"}
    assert {key.removeprefix("loraplex:{adapters}:") for key in await _keys(redis)} == stays


async def test_a_tenant_that_is_forgotten_has_no_grants_either(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.add_version("globex", "gone", TWO)
    await registry.delete("globex", "gone")
    await registry.grants.grant("acme", "sql", "globex")
    await registry.forget_tenant("globex")
    assert await meaning(registry, "globex", "acme/sql") is None
    shown = await registry.show("acme", "sql")
    assert shown is not None and shown.grants == ()


async def test_history_says_who_did_what(registry: Registry) -> None:
    begun = int(time.time())
    await registry.add_version("acme", "sql", ONE, by="k1")
    await registry.add_version("acme", "sql", TWO, promote=False, by="k2")
    await registry.aliases.canary("acme", "sql", 2, 12.5, by="k3")
    await registry.aliases.promote("acme", "sql", by="k4")
    await registry.aliases.rollback("acme", "sql", by="k5")
    events = await registry.history("acme", "sql")
    assert [(event.action, event.version, event.detail, event.by) for event in events] == [
        ("rollback", 1, "", "k5"),
        ("promote", 2, "", "k4"),
        ("canary", 2, "12.5 %", "k3"),
        ("upload", 2, "staged", "k2"),
        ("upload", 1, "live", "k1"),
    ]
    assert all(begun - 1 <= event.at <= time.time() + 1 for event in events)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "SQL", "sql:1", "é"])
async def test_names_are_checked_before_redis_sees_them(registry: Registry, name: str) -> None:
    for call in (
        registry.add_version("acme", name, ONE),
        registry.show("acme", name),
        registry.history("acme", name),
        registry.delete("acme", name),
        registry.delete_version("acme", name, 1),
        registry.rename("acme", name, "x"),
        registry.aliases.promote("acme", name),
        registry.grants.grant("acme", name, "globex"),
        registry.records.export("acme", name),
    ):
        with pytest.raises(InvalidName):
            await call


async def test_a_tenant_cannot_reach_into_anothers_keys(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    for tenant in ("acme:sql", "", "*", "a\n"):
        for call in (
            registry.resolve(tenant, ModelRef("sql")),
            registry.list(tenant),
            registry.grants.grant("acme", "sql", tenant),
        ):
            with pytest.raises(ValueError, match="tenant"):
                await call


async def _keys(redis: Redis) -> list[str]:
    return [key.decode() if isinstance(key, bytes) else key for key in await redis.keys()]
