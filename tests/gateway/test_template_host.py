"""Templates of strangers: rendered as others are, and stopped when they spend too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway import template_host
from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.template_host import TemplateHost

TENANT = "acme"
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [{"role": "user", "content": "Grüße 🙂 \ud800"}]
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}"
OPTIONS: dict[str, Any] = {"add_generation_prompt": True, "variables": {"extra": "!"}}

EXPENSIVE = {
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(80) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "padding": "{{ messages[0].content | center(10000000000) }}",
    "replacing": (
        "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(20) %}"
        "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}"
    ),
    "sorting": (
        "{% set n = namespace(x=range(90000) | list) %}{% for i in range(5000) %}"
        "{% set n.y = (n.x | sort(reverse=true)) %}{% endfor %}"
    ),
}


SLOW = EXPENSIVE["sorting"].replace("5000", "50")
"""Within bounds, but not quick."""


class Host(TemplateHost):
    """Gives expensive templates a second, and others what a slow machine may need to start a process."""

    asked: list[str]

    async def _ask(self, source: str, question: bytes) -> dict[str, Any]:
        self.asked.append(source)
        self._timeout_s = 1.0 if source in EXPENSIVE.values() else 60.0
        return await super()._ask(source, question)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = Host()
    host.asked = []
    yield host
    await host.close()


async def test_it_renders_as_in_this_process(host: TemplateHost) -> None:
    expected = ChatTemplate(PLAIN, NAMED).render(CHAT, **OPTIONS)
    assert await host.render(TENANT, PLAIN, NAMED, CHAT, OPTIONS) == expected == "<s>Grüße 🙂 \ud800!"
    texts = await asyncio.gather(
        *(
            host.render(TENANT, PLAIN, NAMED, [{"role": "user", "content": str(i)}], OPTIONS)
            for i in range(20)
        )
    )
    assert texts == [f"<s>{i}!" for i in range(20)]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ messages[7].content }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{% for i in range(200000) %}{% endfor %}", "loops for too long"),
        ("{% if %}", "cannot be compiled"),
    ],
)
async def test_its_faults_are_the_client_s_to_read(host: TemplateHost, source: str, sentence: str) -> None:
    with pytest.raises(ChatTemplateError, match=sentence):
        await host.render(TENANT, source, NAMED, CHAT, OPTIONS)
    assert await host.render(TENANT, "ok", NAMED, CHAT, OPTIONS) == "ok"


@pytest.mark.parametrize("kind", EXPENSIVE)
async def test_an_expensive_template_ends_and_others_go_on(host: Host, kind: str) -> None:
    expensive = asyncio.create_task(host.render(TENANT, EXPENSIVE[kind], NAMED, CHAT, OPTIONS))
    async with asyncio.timeout(60):
        while not host.asked:
            await asyncio.sleep(0.001)
        others = [host.render("globex", PLAIN, NAMED, CHAT, OPTIONS) for _ in range(3)]
        assert len(await asyncio.gather(*others)) == 3
    with pytest.raises(ChatTemplateError, match=r"too (long|much)"):
        await expensive


async def test_what_took_too_long_is_refused_at_once_for_a_while(host: Host) -> None:
    for _ in range(5):
        with pytest.raises(ChatTemplateError, match="too long"):
            await host.render(TENANT, EXPENSIVE["sorting"], NAMED, CHAT, OPTIONS)
    assert len(host.asked) == 1, "the others are refused from memory"


async def test_templates_that_take_almost_too_long_keep_only_their_tenant_waiting(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of one tenant's requests are there before the other's, which meets one of them at the most."""
    monkeypatch.setattr(template_host, "_REST_FACTOR", 1e6)
    monkeypatch.setattr(template_host, "_MOST_REST_S", 600.0)
    await host.render(TENANT, "quick", NAMED, CHAT, OPTIONS)  # starts the process
    slow = [SLOW + str(number) for number in range(20)]
    requests = [asyncio.create_task(host.render(TENANT, each, NAMED, CHAT, OPTIONS)) for each in slow]
    while len(host.asked) < 2:
        await asyncio.sleep(0.001)
    await host.render("globex", PLAIN, NAMED, CHAT, OPTIONS)
    assert host.asked[1:] == [slow[0], PLAIN]
    await requests[0]
    for _ in range(10):  # each time after the slow one's turn, were it not for its rest
        await host.render("globex", PLAIN, NAMED, CHAT, OPTIONS)
    assert host.asked[3:] == [PLAIN] * 10
    for request in requests[1:]:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


async def test_those_in_line_for_what_took_too_long_are_not_tried(host: Host) -> None:
    source = EXPENSIVE["sorting"]
    requests = [host.render(TENANT, source, NAMED, CHAT, OPTIONS) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_host, "_MOST_REST_S", 0.0)
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(each, ChatTemplateError) for each in outcomes) and host.asked == [source]


async def test_a_client_that_goes_does_not_leave_its_answer_to_the_next(host: Host) -> None:
    assert await host.render(TENANT, "first", NAMED, CHAT, OPTIONS) == "first"
    slow = asyncio.create_task(host.render(TENANT, EXPENSIVE["sorting"], NAMED, CHAT, OPTIONS))
    async with asyncio.timeout(60):
        while len(host.asked) < 2:
            await asyncio.sleep(0.001)
    slow.cancel()
    assert await host.render(TENANT, "second", NAMED, CHAT, OPTIONS) == "second"
