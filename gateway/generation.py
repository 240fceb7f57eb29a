"""One request's life between the API and the engines: tokens in, pieces of text out, and what it cost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.accounts.admission import Admission
from gateway.accounts.entry import Outcome, Settlement
from gateway.accounts.ledger import Ledger
from gateway.detokenizer import TextStream
from gateway.engine_stream import Delta, EngineStream
from gateway.errors import ApiError, unavailable
from gateway.metrics import RequestMetrics
from gateway.reasoning import Reasoning
from gateway.refusals import adapter_unreadable, deadline_passed
from gateway.tokenizer import ModelTokenizer
from protos.engine_pb2 import Failure, FinishReason, ModelInfo, Submit, TokenLogprobs

if TYPE_CHECKING:
    from gateway.echo import Echo

logger = logging.getLogger(__name__)

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token whose logprobs are wanted; the first of a prompt has none. `offset` is where
    its text begins in the choice's text, in characters.
    """

    token: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice's answer. `finish_reason` comes once, with the last piece."""

    choice: int
    text: str
    tokens: Sequence[TokenInfo] = ()
    finish_reason: str | None = None
    reasoning: str = ""
    """What was thought; it goes before the text."""
    stop: str | None = None
    """With the last piece: the stop string that has ended the text."""


@dataclass(slots=True)
class Usage:
    """What a request has cost so far, in tokens, over all its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    """Of the answer's tokens, those that were thought; None where nothing is."""

    def to_dict(self) -> dict[str, object]:
        """Returns OpenAI's usage object."""
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(slots=True)
class _Choice:
    text: TextStream
    waiting: list[TokenInfo] = field(default_factory=list)  # tokens whose text is held back
    last_at: float = 0.0  # when tokens last came, by time.perf_counter()
    ended: bool = False
    sum_logprobs: float = 0.0  # of its tokens, where they are known
    num_tokens: int = 0  # that this is the sum over


class Generation:
    """The answer to one request as it comes: `await start()`,
    then `await next()` until it returns nothing; `close()`.

    Use it as a context manager: whatever happens, what runs on an engine ends with it. The ledger and the
    metrics hear of its end in the event loop's next turn, once what is answered has been sent; at once where
    the next request may need what this one holds.
    """

    admission: Admission
    """By which it runs; to be set before it begins. All else may be made while Redis is asked."""

    def __init__(
        self,
        stream: EngineStream,
        submits: Sequence[Submit],
        *,
        info: ModelInfo,
        tokenizer: ModelTokenizer,
        stops: Sequence[str],
        shown: frozenset[int],
        reasoning: Reasoning | None,
        keep_stop: bool,
        echo: Echo | None,
        metrics: RequestMetrics,
        ledger: Ledger,
    ) -> None:
        """`shown` are special tokens that are text nevertheless; `reasoning` says that some is thought;
        `keep_stop`: what ends a text is a part of it; `echo` puts the prompts before their answers.
        """
        first = submits[0]
        self.usage = Usage(prompt_tokens=sum(len(submit.prompt_tokens) for submit in submits))
        self.tokenizer = tokenizer
        self._stream = stream
        if reasoning is not None:
            shown |= reasoning.shown
            self.usage.reasoning_tokens = 0
        self._choices = [
            _Choice(
                TextStream(
                    tokenizer.decoder(shown),
                    stops,
                    reasoning.splitter() if reasoning else None,
                    keep_stop=keep_stop,
                )
            )
            for submit in submits
            for _ in submit.seeds
        ]
        self._end_tokens = frozenset(first.stop_token_ids) | frozenset(
            () if first.ignore_eos else info.eos_token_ids
        )
        self._keep_stop = keep_stop
        self._echo = echo
        self._metrics = metrics
        self._ledger = ledger
        self._first_at: float | None = None  # when the first token of all came, by time.perf_counter()
        self._outcome = Outcome.DISCONNECTED

    def __enter__(self) -> Generation:
        self._stream.begin()  # first: while an engine has it, there is time
        self._metrics.begin()
        self._ledger.begin(self.admission.entry, self.so_far, admitted=self.admission.admitted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()
        if error is not None and not isinstance(error, GeneratorExit):  # which says that nobody reads on
            self._outcome = self._outcome_of(error)
        elif self._outcome is Outcome.DISCONNECTED and self._stream.is_overdue:
            self._outcome = Outcome.DEADLINE  # clients keep it themselves, and wait for no engine
        if self.admission.awaited:
            self._settle()
        else:
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        settlement = self.so_far()
        if self._outcome is Outcome.DISCONNECTED:
            tokens = settlement.output_tokens
            logger.info("request %s: its client went away after %d tokens", self.admission.entry.id, tokens)
        self._ledger.settle(self.admission.entry, settlement, urgent=self.admission.awaited)
        self._metrics.end(
            self._outcome,
            input_tokens=settlement.input_tokens,
            cached_tokens=settlement.cached_tokens,
            output_tokens=settlement.output_tokens,
            queue_s=self._stream.queue_s,
        )

    def _outcome_of(self, error: BaseException) -> Outcome:
        status = error.status if isinstance(error, ApiError) else 500
        if status == 504:
            return Outcome.DEADLINE
        return Outcome.REFUSED if status in (429, 503) and not self._started else Outcome.FAILED

    @property
    def _started(self) -> bool:
        """Whether an engine has begun to work on it; else it cost nothing."""
        return self._stream.queue_s is not None

    def so_far(self) -> Settlement:
        """Returns what the ledger would say if the request ended now. Tokens count that its client, or the
        one who reads for it, has not taken yet: an engine made them.
        """
        arrived_at, first_at, usage = self.admission.arrived_at, self._first_at, self.usage
        return Settlement(
            self._outcome,
            input_tokens=usage.prompt_tokens if self._started else 0,
            cached_tokens=self._stream.cached_tokens,
            output_tokens=usage.completion_tokens + self._stream.unread,
            duration_ms=_to_ms(time.perf_counter() - arrived_at),
            queue_ms=_to_ms(self._stream.queue_s or 0),
            ttft_ms=None if first_at is None else _to_ms(first_at - arrived_at),
            engine=self._stream.engine_id,
        )

    @property
    def complete(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.ended for choice in self._choices)

    def mean_logprob(self, choice: int) -> float:
        """Returns the mean over a choice's tokens, its end token included; they must have logprobs."""
        state = self._choices[choice]
        return state.sum_logprobs / max(1, state.num_tokens)

    @property
    def vectors(self) -> Sequence[bytes]:
        """Those of the prompts, float32 and little-endian, once it is complete."""
        return self._stream.vectors

    def close(self) -> None:
        """Aborts what still runs, at once; a `next` that waits returns nothing. May be called again."""
        self._stream.close()

    async def start(self) -> None:
        """Returns when an engine has begun to work on it. Raises ApiError when none will, or could."""
        await self._stream.wait_started()
        if (end := self._stream.end_in_queue) is not None:
            _reason_of(end)  # a status can still say it
        self.usage.cached_tokens = self._stream.cached_tokens

    async def next(self) -> list[Piece]:
        """Returns what is new, as few pieces as possible; an empty list at the end, or once closed.

        Raises ApiError when a choice failed, or its engine was lost and no other came.
        """
        while deltas := await self._stream.next():
            now = time.perf_counter()
            pieces = [piece for delta in deltas if (piece := self._consume(delta, now))]
            self.usage.cached_tokens = self._stream.cached_tokens
            if self.usage.reasoning_tokens is not None:
                self.usage.reasoning_tokens = sum(choice.text.reasoning_tokens for choice in self._choices)
            if pieces:
                return (
                    pieces
                    if self._echo is None
                    else self._echo.put_before(pieces, self._stream.prompt_logprobs)
                )
        if self.complete:
            self._outcome = Outcome.COMPLETED
        return []

    def _consume(self, delta: Delta, now: float) -> Piece | None:
        """Takes in one choice's news. Returns what can be shown of it, if anything."""
        choice = self._choices[delta.choice]
        if choice.ended:
            return None
        if delta.tokens:
            self._observe(choice, now)
        text = self._take_tokens(choice, delta)
        self.usage.completion_tokens += delta.dropped
        reason = None
        if choice.text.stopped:
            reason = STOP
            self._stream.end_choice(delta.choice)
        elif delta.finish:
            text += choice.text.finish()
            reason = STOP if choice.text.stopped else _reason_of(delta)
        choice.ended = reason is not None
        tokens = self._take_shown(choice)
        reasoning = ""
        if self.usage.reasoning_tokens is not None:
            reasoning = choice.text.take_reasoning()
        if not (text or tokens or reason or reasoning):
            return None
        stop = choice.text.stop if reason else None
        return Piece(delta.choice, text, tokens, reason, reasoning, stop)

    def _take_tokens(self, choice: _Choice, delta: Delta) -> str:
        """Feeds the choice's text with the tokens up to the
        end token or the stop string. Returns the new text.
        """
        if choice.text.is_plain and not delta.logprobs and self._end_tokens.isdisjoint(delta.tokens):
            self.usage.completion_tokens += len(delta.tokens)
            return choice.text.feed_all(delta.tokens)
        text, before = "", self.usage.completion_tokens
        logprobs = iter(delta.logprobs)
        for token in delta.tokens:
            self.usage.completion_tokens += 1
            is_end = token in self._end_tokens
            if is_end and not self._keep_stop:
                break
            offset = choice.text.decoded_len
            text += choice.text.feed(token)
            if delta.logprobs:
                choice.waiting.append(TokenInfo(token, offset, next(logprobs)))
            if is_end or choice.text.stopped:
                break
        if delta.logprobs:
            taken = self.usage.completion_tokens - before
            choice.num_tokens += taken
            choice.sum_logprobs += sum(each.chosen for each in delta.logprobs[:taken])
        return text

    @staticmethod
    def _take_shown(choice: _Choice) -> Sequence[TokenInfo]:
        """Returns the waiting tokens whose text has begun to be shown; at the end, all not cut off."""
        if not choice.waiting:
            return ()
        if choice.ended and not choice.text.stopped:
            shown = len(choice.waiting)
        else:
            shown = sum(token.offset < choice.text.emitted_len for token in choice.waiting)
        tokens = choice.waiting[:shown]
        del choice.waiting[:shown]
        return tokens

    def _observe(self, choice: _Choice, now: float) -> None:
        if choice.last_at:
            self._metrics.inter_token(now - choice.last_at)
        else:
            self._first_at = self._first_at or now
            self._metrics.first_token(now - self.admission.arrived_at)
        choice.last_at = now


def _to_ms(seconds: float) -> int:
    return int(seconds * 1000)


def _reason_of(delta: Delta) -> str:
    """Returns OpenAI's word for how an engine ended a choice. Raises ApiError when that was no proper end."""
    if delta.finish == FinishReason.FINISH_REASON_STOP:
        return STOP
    if delta.finish == FinishReason.FINISH_REASON_LENGTH:
        return LENGTH
    if delta.failure == Failure.FAILURE_STORE_UNAVAILABLE:
        raise adapter_unreadable()
    if delta.finish == FinishReason.FINISH_REASON_ERROR:
        raise ApiError(
            500, delta.error or "The engine failed.", type="server_error", code="generation_failed"
        )
    if delta.finish == FinishReason.FINISH_REASON_DEADLINE:
        raise deadline_passed()
    raise unavailable(delta.error or "The engine stopped before the answer was complete. Try again.")
