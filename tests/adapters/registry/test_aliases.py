from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from redis.asyncio import Redis

from adapters.model_ref import ModelRef
from adapters.registry import AdapterConflict, AdapterNotFound, Quota, Registry, Resolution
from adapters.registry.desired import desired_adapters
from adapters.registry.scripts import key
from tests.adapters.registry.builders import ONE, THREE, TWO, meaning, summary


async def three_versions(registry: Registry) -> None:
    for content in ("one", "two", "three"):
        await registry.add_version("acme", "sql", summary(content))


async def live(registry: Registry) -> int:
    found = await meaning(registry, "acme", "sql")
    assert found is not None
    return found.version


async def test_promote_and_roll_back_as_far_as_there_is_a_past(registry: Registry) -> None:
    await three_versions(registry)
    assert (await registry.aliases.promote("acme", "sql", 1)).ref == "sql@1"
    assert await live(registry) == 1
    past = [3, 2, 1]
    for version in past:
        assert (await registry.aliases.rollback("acme", "sql")).version == version == await live(registry)
    with pytest.raises(AdapterConflict, match="Promote the version that you want") as refused:
        await registry.aliases.rollback("acme", "sql")
    assert refused.value.code == "nothing_to_roll_back" and await live(registry) == 1


async def test_a_rollback_passes_over_what_was_deleted(registry: Registry) -> None:
    await three_versions(registry)
    await registry.delete_version("acme", "sql", 2)
    assert (await registry.aliases.rollback("acme", "sql")).version == 1
    await registry.aliases.promote("acme", "sql", 3)
    await registry.aliases.promote("acme", "sql", 1)
    await registry.delete_version("acme", "sql", 3)
    with pytest.raises(AdapterConflict):
        await registry.aliases.rollback("acme", "sql")


async def test_promote_without_a_number(registry: Registry) -> None:
    await three_versions(registry)
    await registry.aliases.promote("acme", "sql", 1)
    assert (await registry.aliases.promote("acme", "sql")).version == 3
    await registry.aliases.canary("acme", "sql", 2, 50)
    assert (await registry.aliases.promote("acme", "sql")).version == 2
    assert await registry.aliases.promote("acme", "sql", 2) == await meaning(registry, "acme", "sql")


async def test_promoting_what_is_live_changes_nothing_but_ends_a_canary(registry: Registry) -> None:
    await three_versions(registry)
    events = len(await registry.history("acme", "sql"))
    await registry.aliases.promote("acme", "sql", 3)
    assert len(await registry.history("acme", "sql")) == events
    await registry.aliases.canary("acme", "sql", 1, 50)
    await registry.aliases.promote("acme", "sql", 3)
    found = await registry.resolve("acme", ModelRef("sql"))
    assert found is not None and found.canary is None
    assert (await registry.aliases.rollback("acme", "sql")).version == 2


async def test_what_is_not_there_is_not_promoted(registry: Registry) -> None:
    await three_versions(registry)
    for call, ref in (
        (registry.aliases.promote("acme", "sql", 9), "sql@9"),
        (registry.aliases.canary("acme", "sql", 9, 10), "sql@9"),
        (registry.aliases.promote("acme", "nope"), "nope"),
        (registry.aliases.rollback("acme", "nope"), "nope"),
        (registry.aliases.canary("acme", "nope", 1, 10), "nope"),
        (registry.aliases.end_canary("acme", "nope"), "nope"),
        (registry.aliases.pin("acme", "nope", quota=1), "nope"),
        (registry.aliases.unpin("acme", "nope"), "nope"),
        (registry.aliases.promote("globex", "sql", 1), "sql"),
    ):
        with pytest.raises(AdapterNotFound, match=f"There is no adapter '{ref}'"):
            await call


async def canary(registry: Registry) -> Resolution:
    found = await registry.resolve("acme", ModelRef("sql"))
    assert found is not None and found.canary is not None and found.live is not None
    return found


async def test_a_canary_gets_its_share_at_random(registry: Registry) -> None:
    await three_versions(registry)
    await registry.aliases.canary("acme", "sql", 1, 10)
    found = await canary(registry)
    random.seed(4)
    chosen = [found.choose("acme", None) for _ in range(10_000)]
    share = sum(version is not None and version.version == 1 for version in chosen) / len(chosen)
    assert 0.09 < share < 0.11
    assert {version.version for version in chosen if version} == {1, 3}


async def test_a_user_stays_with_a_version(registry: Registry) -> None:
    """The same for each gateway, since nothing but names decides; and of users, as many as of requests."""
    await three_versions(registry)
    of_users: dict[float, set[str]] = {}
    for percent in (0.01, 5, 10, 50, 100):
        await registry.aliases.canary("acme", "sql", 1, percent)
        found = await canary(registry)
        again = await canary(registry)
        users = [f"user-{number}" for number in range(4000)]
        assert all(found.choose("acme", user) == again.choose("acme", user) for user in users)
        of_users[percent] = {user for user in users if found.choose("acme", user) != found.live}
        assert abs(len(of_users[percent]) / len(users) - percent / 100) < 0.02
    assert all(of_users[lower] <= of_users[higher] for lower, higher in pairwise(of_users))
    assert of_users[100] == set(users)
    other = {user for user in users if found.choose("globex", user) != found.live}
    assert other == of_users[100]
    await registry.aliases.canary("acme", "sql", 1, 50)
    found = await canary(registry)
    assert {user for user in users if found.choose("globex", user) != found.live} != of_users[50]
    assert found.choose("acme", "\ud800") in (found.live, found.canary and found.canary.version)


async def test_only_the_bare_name_is_split(registry: Registry) -> None:
    await three_versions(registry)
    await registry.aliases.canary("acme", "sql", 1, 100)
    for ref in (ModelRef("sql", live_only=True), ModelRef("sql", 3), ModelRef("sql", 2)):
        found = await registry.resolve("acme", ref)
        assert found is not None and found.canary is None


async def test_what_ends_a_canary(registry: Registry) -> None:
    await three_versions(registry)
    for end in (
        lambda: registry.aliases.end_canary("acme", "sql"),
        lambda: registry.aliases.promote("acme", "sql", 1),
        lambda: registry.aliases.rollback("acme", "sql"),
        lambda: registry.add_version("acme", "sql", ONE),
    ):
        await registry.aliases.canary("acme", "sql", 2, 30)
        assert (await canary(registry)).canary is not None
        await registry.add_version("acme", "sql", ONE, promote=False)
        assert (await canary(registry)).canary is not None
        await end()
        found = await registry.resolve("acme", ModelRef("sql"))
        assert found is not None and found.canary is None
    await registry.aliases.end_canary("acme", "sql")


async def test_what_can_be_no_canary(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE, promote=False)
    with pytest.raises(AdapterConflict, match="no live version yet"):
        await registry.aliases.canary("acme", "sql", 1, 10)
    await registry.aliases.promote("acme", "sql")
    with pytest.raises(AdapterConflict, match="sql@1 is the live version"):
        await registry.aliases.canary("acme", "sql", 1, 10)


async def test_a_pin_follows_the_live_version(registry: Registry, redis: Redis) -> None:
    await three_versions(registry)
    assert (await desired_adapters(redis, [])).pinned == frozenset()
    await registry.aliases.pin("acme", "sql", quota=1)
    await registry.aliases.pin("acme", "sql", quota=1)
    assert (await desired_adapters(redis, [])).pinned == {THREE.digest}
    await registry.aliases.promote("acme", "sql", 1)
    assert (await desired_adapters(redis, [])).pinned == {ONE.digest}
    await registry.aliases.rollback("acme", "sql")
    await registry.add_version("acme", "sql", TWO)
    assert (await desired_adapters(redis, [])).pinned == {TWO.digest}
    await registry.rename("acme", "sql", "new")
    assert (await desired_adapters(redis, [])).pinned == {TWO.digest}
    await registry.aliases.unpin("acme", "new")
    await registry.aliases.unpin("acme", "new")
    assert (await desired_adapters(redis, [])).pinned == frozenset()
    await registry.aliases.pin("acme", "new", quota=1)
    await registry.delete("acme", "new")
    assert (await desired_adapters(redis, [])).pinned == frozenset()


async def test_pins_have_a_quota_by_tenant(registry: Registry, redis: Redis) -> None:
    for tenant in ("acme", "acme-2"):
        for name in ("a", "b", "c"):
            await registry.add_version(tenant, name, summary(tenant + name))
        calls = (registry.aliases.pin(tenant, name, quota=2) for name in "abc")
        answers = await asyncio.gather(*calls, return_exceptions=True)
        [refused] = [answer for answer in answers if answer is not None]
        assert isinstance(refused, AdapterConflict) and refused.code == "pin_quota_exceeded"
        assert "has pinned 2 adapters" in refused.message
    assert len((await desired_adapters(redis, [])).pinned) == 4


async def test_of_a_names_changes_the_last_are_kept(registry: Registry, redis: Redis) -> None:
    await three_versions(registry)
    for number in range(210):
        await registry.aliases.promote("acme", "sql", 1 + number % 2)
    history = await registry.history("acme", "sql")
    assert len(history) == 200 and history[0].version == 2
    assert await redis.llen(key("past", "acme", "sql")) == 100  # type: ignore[misc]
    assert (await registry.aliases.rollback("acme", "sql")).version == 1


async def test_pins_have_a_quota_of_rank_pages(registry: Registry) -> None:
    """By the largest version of each name, so that whatever is promoted later has been counted."""
    pin, quota = registry.aliases.pin, Quota(pinned_pages=4)

    async def add(name: str, rank: int, *, promote: bool = True) -> None:
        version = replace(summary(f"{name}{rank}"), rank=rank)
        await registry.add_version("acme", name, version, promote=promote, quota=quota)

    for name, rank in (("a", 16), ("b", 17), ("c", 33), ("d", 1)):
        await add(name, rank)
    await add("d", 20)
    await registry.aliases.rollback("acme", "d")
    for name in ("a", "b"):
        await pin("acme", name, quota=9, most_pages=4)
    for name in ("c", "d"):
        with pytest.raises(AdapterConflict, match=r"take 3 of 4 rank pages.*'[cd]'.*Unpin") as caught:
            await pin("acme", name, quota=9, most_pages=4)
        assert caught.value.code == "pinned_pages_quota_exceeded"
    await pin("acme", "a", quota=9, most_pages=0)  # it is pinned already
    await add("a", 32)
    with pytest.raises(AdapterConflict, match=r"'b' is pinned.*may pin 4, of which its other pins take 2"):
        await add("b", 40, promote=False)
    await add("b", 20)
    await registry.aliases.unpin("acme", "a")
    await pin("acme", "d", quota=9, most_pages=4)
    await add("a", 256)
    quota = Quota(pinned_pages=1)  # what was there before it was lowered may go on
    await add("b", 19)


async def test_what_is_only_staged_is_not_pinned(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE, promote=False)
    with pytest.raises(AdapterConflict, match="no live version yet"):
        await registry.aliases.pin("acme", "sql", quota=1)
