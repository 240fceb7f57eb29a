"""What no name of any tenant means any more leaves the engine; what somebody else still has stays there."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.e2e.processes import Stack
from tests.e2e.tiny import TinyZoo, ask, upload, words

pytestmark = pytest.mark.e2e


async def test_a_deleted_adapter_leaves_the_engine_with_its_last_name(
    zoo: TinyZoo, tiny_stack: Stack
) -> None:
    one, other = (tiny_stack.create_tenant(tenant) for tenant in ("deleting", "keeping"))
    alone, shared = (
        upload(tiny_stack, one, name, zoo.add(name, seed=seed))["digest"]
        for name, seed in (("alone", 91), ("shared", 92))
    )
    assert upload(tiny_stack, other, "mine", zoo.adapters["shared"])["digest"] == shared
    prompt = words(40, 9)
    for key, name in ((one, "alone"), (one, "shared"), (other, "mine")):
        ask(tiny_stack, key, name, prompt)
    held = (await tiny_stack.renewed_lease()).residency
    assert held[alone] == held[shared] == "device"

    headers = {"Authorization": f"Bearer {one}"}
    async with httpx.AsyncClient(base_url=tiny_stack.url, headers=headers, timeout=60) as client:
        assert (await client.get("/v1/adapters")).json()["bytes"] > 0
        for name in ("alone", "shared"):
            (await client.delete(f"/v1/adapters/{name}")).raise_for_status()
        assert (await client.get("/v1/adapters")).json()["bytes"] == 0
    async with asyncio.timeout(60):
        while alone in (held := (await tiny_stack.renewed_lease()).residency):
            pass
    assert held[shared] == "device"
    text, _ = zoo.expected("shared", prompt, 16)
    assert ask(tiny_stack, other, "mine", prompt).text == text
