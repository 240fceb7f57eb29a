from __future__ import annotations

import pytest

from adapters.registry import AdapterConflict, AdapterNotFound, Registry, grants
from tests.adapters.registry.builders import ONE, TWO, meaning


async def test_a_grant_lets_one_other_tenant_use_one_name(registry: Registry) -> None:
    first = await registry.add_version("acme", "sql", ONE)
    second = await registry.add_version("acme", "sql", TWO)
    await registry.add_version("acme", "secret", ONE)
    assert await meaning(registry, "globex", "acme/sql") is None
    await registry.grants.grant("acme", "sql", "globex")
    await registry.grants.grant("acme", "sql", "globex")
    assert await meaning(registry, "globex", "acme/sql") == second
    assert await meaning(registry, "globex", "acme/sql@1") == first
    assert await meaning(registry, "globex", "acme/sql@live") == second
    assert second.ref_for("globex") == "acme/sql@2" and second.ref_for("acme") == "sql@2"
    for caller, ref in (
        ("globex", "sql"),
        ("globex", "acme/sql@3"),
        ("globex", "acme/secret"),
        ("globex", "acme/nope"),
        ("globex", "initech/sql"),
        ("initech", "acme/sql"),
        ("acme", "globex/sql"),
    ):
        assert await meaning(registry, caller, ref) is None
    shown = await registry.show("acme", "sql")
    assert shown is not None and shown.grants == ("globex",)
    assert await registry.grants.granted_to("globex") == [second]
    assert await registry.grants.granted_to("initech") == []


async def test_own_adapters_may_be_written_in_full(registry: Registry) -> None:
    added = await registry.add_version("acme", "sql", ONE)
    assert await meaning(registry, "acme", "acme/sql") == added


async def test_a_revoked_grant_ends_at_once(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.grants.grant("acme", "sql", "globex")
    await registry.grants.grant("acme", "sql", "initech")
    await registry.grants.revoke("acme", "sql", "globex")
    await registry.grants.revoke("acme", "sql", "globex")
    assert await meaning(registry, "globex", "acme/sql") is None
    assert await meaning(registry, "initech", "acme/sql") is not None
    assert await registry.grants.granted_to("globex") == []


async def test_a_new_adapter_of_an_old_name_is_granted_to_nobody(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.grants.grant("acme", "sql", "globex")
    await registry.delete("acme", "sql")
    assert await registry.grants.granted_to("globex") == []
    await registry.add_version("acme", "sql", TWO)
    assert await meaning(registry, "globex", "acme/sql") is None


async def test_a_name_that_a_granted_adapter_had_before_is_granted_to_nobody(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    await registry.grants.grant("acme", "sql", "globex")
    await registry.rename("acme", "sql", "new")
    await registry.add_version("acme", "sql", TWO)
    assert await meaning(registry, "globex", "acme/sql") is None
    assert [version.name for version in await registry.grants.granted_to("globex")] == ["new"]


async def test_granted_names_are_listed_in_order_when_live(registry: Registry) -> None:
    for owner, name in (("b-corp", "x"), ("acme", "z"), ("acme", "a")):
        await registry.add_version(owner, name, ONE)
        await registry.grants.grant(owner, name, "globex")
    await registry.add_version("acme", "staged", ONE, promote=False)
    await registry.grants.grant("acme", "staged", "globex")
    listed = [version.ref_for("globex") for version in await registry.grants.granted_to("globex")]
    assert listed == ["acme/a@1", "acme/z@1", "b-corp/x@1"]


async def test_grants_of_a_name_are_bounded(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants, "_MAX_GRANTS", 2)
    await registry.add_version("acme", "sql", ONE)
    for tenant in ("b", "c", "b"):
        await registry.grants.grant("acme", "sql", tenant)
    with pytest.raises(AdapterConflict, match="shared with 2 tenants"):
        await registry.grants.grant("acme", "sql", "d")
    await registry.grants.revoke("acme", "sql", "b")
    await registry.grants.grant("acme", "sql", "d")


async def test_only_owners_grant(registry: Registry) -> None:
    await registry.add_version("acme", "sql", ONE)
    for call in (registry.grants.grant, registry.grants.revoke):
        with pytest.raises(AdapterNotFound):
            await call("globex", "sql", "globex")
