"""What a step has to tell each link, in columns, as the wire has it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from engine.sequence import Failure, FinishReason, Refusal, Request, Sequence
from engine.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Started:
    request_id: int
    cached_tokens: int
    queue_us: int


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: int
    choice: int
    reason: FinishReason
    error: str = ""
    refusal: Refusal = Refusal.UNSPECIFIED
    retry_after_s: float = 0.0
    failure: Failure = Failure.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of a prompt's tokens from ``start`` on."""

    request_id: int
    start: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Vector:
    """Of a prompt: float32, little-endian."""

    request_id: int
    values: bytes


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search has cost since this was told last: a token for each beam in each step."""

    request_id: int
    tokens: int


@dataclass(slots=True)
class LinkOutput:
    """News for one link. The first four lists have one entry for each new token, in order."""

    request_ids: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    searched: list[Searched] = field(default_factory=list)

    def merge(self, later: LinkOutput) -> None:
        """Appends the news of a later step; the receiver may not notice that they were two."""
        self.request_ids += later.request_ids
        self.choices += later.choices
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.started += later.started
        self.finished += later.finished
        self.prompts += later.prompts
        self.vectors += later.vectors
        self.searched += later.searched


class Outputs:
    """Collects the news of one step by link."""

    def __init__(self) -> None:
        self._by_link: dict[Hashable, LinkOutput] = {}

    def token(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        out = self._of(seq.request.link)
        out.request_ids.append(seq.request.request_id)
        out.choices.append(seq.choice)
        out.tokens.append(token)
        out.logprobs.append(logprobs)

    def answer(self, seq: Sequence, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        """All tokens of a choice at once."""
        out = self._of(seq.request.link)
        out.request_ids += [seq.request.request_id] * len(tokens)
        out.choices += [seq.choice] * len(tokens)
        out.tokens += tokens
        out.logprobs += logprobs

    def searched(self, request: Request, tokens: int) -> None:
        self._of(request.link).searched.append(Searched(request.request_id, tokens))

    def prompt_logprobs(self, request: Request, start: int, tokens: tuple[TokenLogprobs, ...]) -> None:
        self._of(request.link).prompts.append(PromptLogprobs(request.request_id, start, tokens))

    def vector(self, request: Request, values: bytes) -> None:
        self._of(request.link).vectors.append(Vector(request.request_id, values))

    def started(self, request: Request, *, cached_tokens: int, queue_us: int) -> None:
        self._of(request.link).started.append(Started(request.request_id, cached_tokens, queue_us))

    def finished(
        self,
        request: Request,
        choice: int,
        reason: FinishReason,
        error: str = "",
        failure: Failure = Failure.UNSPECIFIED,
    ) -> None:
        self._of(request.link).finished.append(
            Finished(request.request_id, choice, reason, error, failure=failure)
        )

    def refused(self, request: Request, refusal: Refusal, why: str, retry_after_s: float) -> None:
        """All choices of a request end before they were begun."""
        for choice in range(len(request.sampling)):
            self._of(request.link).finished.append(
                Finished(request.request_id, choice, FinishReason.REFUSED, why, refusal, retry_after_s)
            )

    def drop(self, link: Hashable) -> None:
        """Forgets what a link that has ended would have been told."""
        self._by_link.pop(link, None)

    def take(self) -> dict[Hashable, LinkOutput]:
        """The news so far, by link; the collection starts again, empty."""
        taken, self._by_link = self._by_link, {}
        return taken

    def _of(self, link: Hashable) -> LinkOutput:
        out = self._by_link.get(link)
        if out is None:
            out = self._by_link[link] = LinkOutput()
        return out
