"""One gateway worker's stream, seen from the engine: what it is owed, and what it has not been told yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from engine.outputs import LinkOutput, PromptLogprobs
from engine.step import TokenLogprobs
from protos import engine_pb2 as pb

MAX_TOKENS_PER_MESSAGE = 8192
MAX_LOGPROBS_PER_MESSAGE = 1024
"""Bounds of one message, well below gRPC's 4 MiB, for a reader that has much to catch up with."""


class Link:
    """Holds the news for one stream until it can be written; belongs to the server's event loop.

    News that comes while a write is under way is merged, so that a slow reader gets fewer, larger messages.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self._open_choices: dict[int, int] = {}
        self._pending: LinkOutput | None = None
        self._changed = asyncio.Event()
        self._ended = False

    def open(self, request_id: int, num_choices: int) -> bool:
        """Notes a new request; False if its id is in use."""
        if request_id in self._open_choices:
            return False
        self._open_choices[request_id] = num_choices
        return True

    def put(self, news: LinkOutput) -> None:
        """Adds news to what is to be written."""
        if self._pending is None:
            self._pending = news
        else:
            self._pending.merge(news)
        self._changed.set()

    def end(self, fault: str | None = None) -> None:
        """Lets `messages` stop. ``fault``: what the client did wrong."""
        self.fault = fault
        self._ended = True
        self._changed.set()

    async def messages(self) -> list[pb.LinkResponse]:
        """Waits for news and takes all of it, as one message unless that were too large; none at the end."""
        await self._changed.wait()
        self._changed.clear()
        news, self._pending = self._pending, None
        if self._ended or news is None:
            return []
        for finished in news.finished:
            self._close(finished.request_id)
        return [to_message(part) for part in split(news)]

    def _close(self, request_id: int) -> None:
        left = self._open_choices.get(request_id, 0) - 1
        if left > 0:
            self._open_choices[request_id] = left
        else:
            self._open_choices.pop(request_id, None)


def split(news: LinkOutput) -> list[LinkOutput]:
    """Cuts news into parts of bounded size; an end stays in the part that has the last token before it, and
    what is told of prompts comes before any token.
    """
    prompts = [part for prompt in news.prompts for part in _split_prompt(prompt)]
    if sum(len(part.tokens) for part in prompts) > MAX_LOGPROBS_PER_MESSAGE:
        rest = replace(news, prompts=[])
        return [*(LinkOutput(prompts=[part]) for part in prompts), *split(rest)]
    has_logprobs = any(entry is not None for entry in news.logprobs)
    width = MAX_LOGPROBS_PER_MESSAGE if has_logprobs else MAX_TOKENS_PER_MESSAGE
    if len(news.tokens) <= width:
        return [news]
    starts = range(0, len(news.tokens), width)
    parts = [
        LinkOutput(
            news.request_ids[start : start + width],
            news.choices[start : start + width],
            news.tokens[start : start + width],
            news.logprobs[start : start + width],
        )
        for start in starts
    ]
    keys = zip(news.request_ids, news.choices, strict=True)
    last_part = {key: index // width for index, key in enumerate(keys)}
    parts[0].started, parts[0].prompts, parts[0].vectors = news.started, prompts, news.vectors
    parts[0].searched = news.searched
    for finished in news.finished:
        where = last_part.get((finished.request_id, finished.choice), len(parts) - 1)
        parts[where].finished.append(finished)
    return parts


def _split_prompt(prompt: PromptLogprobs) -> list[PromptLogprobs]:
    width = MAX_LOGPROBS_PER_MESSAGE
    return [
        PromptLogprobs(prompt.request_id, prompt.start + at, prompt.tokens[at : at + width])
        for at in range(0, len(prompt.tokens), width)
    ]


def to_message(news: LinkOutput) -> pb.LinkResponse:
    """The wire's form of news."""
    message = pb.LinkResponse(request_ids=news.request_ids, choices=news.choices, tokens=news.tokens)
    if any(entry is not None for entry in news.logprobs):
        message.logprobs.extend(_logprobs(news.logprobs))
    for prompt in news.prompts:
        message.prompt_logprobs.add(
            request_id=prompt.request_id, start=prompt.start, tokens=_logprobs(prompt.tokens)
        )
    for vector in news.vectors:
        message.embeddings.add(request_id=vector.request_id, values=vector.values)
    for searched in news.searched:
        message.searched.add(request_id=searched.request_id, tokens=searched.tokens)
    for started in news.started:
        message.started.add(
            request_id=started.request_id, cached_tokens=started.cached_tokens, queue_us=started.queue_us
        )
    for finished in news.finished:
        message.finished.add(
            request_id=finished.request_id,
            choice=finished.choice,
            reason=f"FINISH_REASON_{finished.reason.name}",
            error=finished.error,
            refusal=f"REFUSAL_{finished.refusal.name}",
            retry_after_ms=round(1000 * finished.retry_after_s),
            failure=f"FAILURE_{finished.failure.name}",
        )
    return message


def _logprobs(entries: Sequence[TokenLogprobs | None]) -> list[pb.TokenLogprobs]:
    empty = pb.TokenLogprobs()
    return [
        empty
        if entry is None
        else pb.TokenLogprobs(
            chosen=entry.chosen, top_tokens=entry.top_tokens, top_logprobs=entry.top_logprobs
        )
        for entry in entries
    ]
