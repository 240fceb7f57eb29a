"""What an adapter is decides its answers and who shares its cache; what it is called decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from tests.e2e.processes import Stack
from tests.e2e.tiny import TINY, Answer, TinyZoo, ask, upload, words

pytestmark = pytest.mark.e2e

LENGTH = 200
WHOLE = LENGTH // 16 * 16  # of 16 tokens a block
CAUGHT_UP_S = 1.0
"""Within this, a client has read what was computed while it did not read."""


@pytest.fixture(scope="module", autouse=True)
def adapters(zoo: TinyZoo) -> None:
    for seed, name in enumerate(("first", "second", "third"), start=1):
        zoo.add(name, seed=seed)


def assert_answers_as(zoo: TinyZoo, adapter: str | None, prompt: Sequence[int], answer: Answer) -> None:
    """The text is PEFT's, and so is the logprob of each of its tokens."""
    text, logprobs = zoo.expected(adapter, prompt, len(answer.logprobs))
    assert answer.text == text
    assert answer.logprobs == pytest.approx(logprobs, abs=2e-3)


def test_a_new_version_answers_as_on_a_cold_server_and_an_old_one_finds_its_own_blocks(
    zoo: TinyZoo, tiny_stack: Stack
) -> None:
    key, prompt = tiny_stack.create_tenant("reloading"), words(LENGTH, 1)
    upload(tiny_stack, key, "sql", zoo.adapters["first"])
    cold, warm = (ask(tiny_stack, key, "sql", prompt) for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, WHOLE)
    upload(tiny_stack, key, "sql", zoo.adapters["second"])
    new = ask(tiny_stack, key, "sql", prompt)
    assert (new.model, new.cached_tokens) == ("sql@2", 0)
    old = ask(tiny_stack, key, "sql@1", prompt)
    assert (old.model, old.cached_tokens) == ("sql@1", WHOLE)
    base = ask(tiny_stack, key, TINY, prompt)
    assert base.cached_tokens == 0
    for adapter, answer in (("first", cold), ("first", warm), ("second", new), ("first", old), (None, base)):
        assert_answers_as(zoo, adapter, prompt, answer)
    assert len({cold.text, new.text, base.text}) == 3


async def test_a_stream_goes_on_with_the_version_that_it_began_with(zoo: TinyZoo, tiny_stack: Stack) -> None:
    key, prompt = tiny_stack.create_tenant("streaming"), words(LENGTH, 2)
    upload(tiny_stack, key, "sql", zoo.adapters["first"])
    text, num_tokens, reloaded_at, during = "", 0, 0.0, None
    async with tiny_stack.async_client(key) as client:
        stream = await client.completions.create(
            model="sql",
            prompt=prompt,
            max_tokens=1500,
            temperature=0,
            logprobs=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            assert chunk.model == "sql@1"
            text += chunk.choices[0].text
            logprobs = chunk.choices[0].logprobs
            num_tokens += len(logprobs.tokens or ()) if logprobs else 0
            if during is None:
                await asyncio.to_thread(upload, tiny_stack, key, "sql", zoo.adapters["second"])
                during = await asyncio.to_thread(ask, tiny_stack, key, "sql", prompt)
                reloaded_at = time.monotonic()
            elif time.monotonic() - reloaded_at > CAUGHT_UP_S:
                break
        await stream.close()
    assert during is not None and (during.model, during.cached_tokens) == ("sql@2", 0)
    assert_answers_as(zoo, "second", prompt, during)
    # Of a character that the last token does not finish, half is another text.
    whole = ask(tiny_stack, key, "sql@1", prompt, num_tokens).text
    assert text.rstrip("\ufffd") == whole.rstrip("\ufffd")
    assert text.startswith(zoo.expected("first", prompt, 16)[0].rstrip("\ufffd"))


def test_two_tenants_with_one_name_share_no_block(zoo: TinyZoo, tiny_stack: Stack) -> None:
    keys = [tiny_stack.create_tenant(tenant) for tenant in ("one-sql", "other-sql")]
    prompt = words(LENGTH, 3)
    for key, adapter in zip(keys, ("first", "second"), strict=True):
        upload(tiny_stack, key, "sql", zoo.adapters[adapter])
    for expected_cached in (0, WHOLE):
        for key, adapter in zip(keys, ("first", "second"), strict=True):
            answer = ask(tiny_stack, key, "sql", prompt)
            assert (answer.model, answer.cached_tokens) == ("sql@1", expected_cached)
            assert_answers_as(zoo, adapter, prompt, answer)


async def test_one_digest_under_two_names_is_one_copy_whose_blocks_a_scope_shares(
    zoo: TinyZoo, tiny_stack: Stack
) -> None:
    key, other = (tiny_stack.create_tenant(tenant) for tenant in ("twice", "thrice"))
    prompt = words(LENGTH, 4)
    uploads = [
        upload(tiny_stack, key, "sql", zoo.adapters["third"]),
        upload(tiny_stack, key, "again", zoo.adapters["third"]),
        upload(tiny_stack, other, "sql", zoo.adapters["third"]),
    ]
    (digest,) = {uploaded["digest"] for uploaded in uploads}
    blobs = [path for path in tiny_stack.store.glob("sha256/*/*") if path.name == digest]
    assert len(blobs) == 1
    answers = [
        ask(tiny_stack, key, "sql", prompt),
        ask(tiny_stack, key, "again", prompt),
        ask(tiny_stack, other, "sql", prompt),
        ask(tiny_stack, other, "sql", prompt),
    ]
    assert [answer.cached_tokens for answer in answers] == [0, WHOLE, 0, WHOLE]
    for answer in answers:
        assert_answers_as(zoo, "third", prompt, answer)
    lease = await tiny_stack.renewed_lease()
    assert lease.residency[digest] == "device"
