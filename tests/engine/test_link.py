"""One stream's news: merging for a slow reader, splitting what is too large, and the wire's form."""

from __future__ import annotations

import asyncio

from engine import link as link_module
from engine.link import MAX_LOGPROBS_PER_MESSAGE, MAX_TOKENS_PER_MESSAGE, Link, split, to_message
from engine.outputs import Finished, LinkOutput, PromptLogprobs, Started
from engine.sequence import Failure, FinishReason
from engine.step import TokenLogprobs
from protos import engine_pb2 as pb


def news(count: int, *, request_id: int = 1, logprobs: TokenLogprobs | None = None) -> LinkOutput:
    return LinkOutput([request_id] * count, [0] * count, list(range(count)), [logprobs] * count)


async def test_news_is_merged_until_it_is_taken() -> None:
    link = Link()
    link.open(1, 1)
    for _ in range(3):
        link.put(news(2))
    last = news(1)
    last.finished.append(Finished(1, 0, FinishReason.LENGTH))
    link.put(last)
    (message,) = await link.messages()
    assert list(message.tokens) == [0, 1, 0, 1, 0, 1, 0]
    assert [end.reason for end in message.finished] == [pb.FINISH_REASON_LENGTH]


async def test_a_request_id_is_free_again_when_its_last_choice_has_ended() -> None:
    link = Link()
    assert link.open(1, 2) and not link.open(1, 1)
    for choice in (0, 1):
        end = LinkOutput()
        end.finished.append(Finished(1, choice, FinishReason.STOP))
        link.put(end)
        await link.messages()
        assert link.open(1, 1) == (choice == 1)


async def test_the_end_wakes_who_waits_for_news() -> None:
    link = Link()
    waiting = asyncio.create_task(link.messages())
    await asyncio.sleep(0)
    link.end("a fault")
    assert await waiting == [] and link.fault == "a fault"


def test_an_end_is_in_the_message_with_its_last_token() -> None:
    total = 2 * MAX_TOKENS_PER_MESSAGE + 5
    merged = LinkOutput([1] * 10 + [2] * (total - 10), [0] * total, [7] * total, [None] * total)
    merged.started = [Started(1, 0, 5), Started(2, 0, 5), Started(3, 0, 5)]
    merged.finished = [Finished(number, 0, FinishReason.STOP) for number in (1, 2, 3)]
    parts = split(merged)
    assert [len(part.tokens) for part in parts] == [MAX_TOKENS_PER_MESSAGE] * 2 + [5]
    assert [[end.request_id for end in part.finished] for part in parts] == [[1], [], [2, 3]]
    assert [len(part.started) for part in parts] == [3, 0, 0]


def test_messages_with_logprobs_stay_below_grpcs_limit() -> None:
    entry = TokenLogprobs(-0.5, tuple(range(100_000, 100_020)), tuple(-float(i) for i in range(20)))
    parts = split(news(3 * MAX_LOGPROBS_PER_MESSAGE, logprobs=entry))
    assert len(parts) == 3
    assert all(to_message(part).ByteSize() < 1 << 20 for part in parts)
    assert to_message(news(link_module.MAX_TOKENS_PER_MESSAGE)).ByteSize() < 1 << 20


def test_the_wire_says_what_has_failed() -> None:
    told = news(1)
    away = Finished(1, 0, FinishReason.ERROR, "no", failure=Failure.STORE_UNAVAILABLE)
    told.finished = [away, Finished(2, 0, FinishReason.ERROR, "no")]
    failures = [finished.failure for finished in to_message(told).finished]
    assert failures == [pb.FAILURE_STORE_UNAVAILABLE, pb.FAILURE_UNSPECIFIED]


def test_what_is_told_of_prompts_comes_first_and_in_parts() -> None:
    entry = TokenLogprobs(-0.5, tuple(range(100_000, 100_020)), tuple(-float(i) for i in range(20)))
    told = news(2)
    told.prompts = [PromptLogprobs(1, 1, (entry,) * 2500), PromptLogprobs(2, 7, (entry,) * 3)]
    told.finished = [Finished(1, 0, FinishReason.STOP)]
    messages = [to_message(part) for part in split(told)]
    assert all(message.ByteSize() < 1 << 20 for message in messages)
    prompts = [
        (p.request_id, p.start, len(p.tokens)) for message in messages for p in message.prompt_logprobs
    ]
    assert prompts == [(1, 1, 1024), (1, 1025, 1024), (1, 2049, 452), (2, 7, 3)]
    assert list(messages[-1].tokens) == [0, 1] and messages[-1].finished
    assert not any(message.tokens or message.finished for message in messages[:-1])
    few = news(1)
    few.prompts = [PromptLogprobs(2, 7, (entry,) * 3)]
    (message,) = map(to_message, split(few))
    assert message.prompt_logprobs[0].tokens[2].chosen == -0.5 and message.tokens


def test_logprobs_are_there_for_all_tokens_or_for_none() -> None:
    plain = to_message(news(2))
    assert len(plain.logprobs) == 0
    mixed = news(1, logprobs=TokenLogprobs(-0.25, (5, 6), (-0.25, -2.0)))
    mixed.merge(news(1, request_id=2))
    message = to_message(mixed)
    assert [list(entry.top_tokens) for entry in message.logprobs] == [[5, 6], []]
    assert message.logprobs[0].chosen == -0.25
