"""One request's life between the API and the engines: tokens in, pieces of text out, and what it cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.accounts.admission import Admission
from gateway.accounts.entry import Outcome, Settlement
from gateway.accounts.ledger import Ledger
from gateway.detokenizer import TextStream
from gateway.engine_stream import Delta, EngineStream
from gateway.errors import ApiError, unavailable
from gateway.metrics import RequestMetrics
from gateway.refusals import deadline_passed
from gateway.tokenizer import ModelTokenizer
from protos.engine_pb2 import FinishReason, ModelInfo, Submit, TokenLogprobs

logger = logging.getLogger(__name__)

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token whose logprobs are wanted. `offset` is where
    its text begins in the choice's text, in characters.
    """

    token: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice's answer. `finish_reason` comes once, with the last piece."""

    choice: int
    text: str
    tokens: Sequence[TokenInfo] = ()
    finish_reason: str | None = None


@dataclass(slots=True)
class Usage:
    """What a request has cost so far, in tokens, over all its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_dict(self) -> dict[str, object]:
        """Returns OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class _Choice:
    text: TextStream
    waiting: list[TokenInfo] = field(default_factory=list)  # tokens whose text is held back
    last_at: float = 0.0  # when tokens last came, by time.perf_counter()
    ended: bool = False


class Generation:
    """The answer to one request as it comes: `await start()`,
    then `await next()` until it returns nothing; `close()`.

    Use it as a context manager: whatever happens, what runs on an engine ends with it.
    """

    def __init__(
        self,
        stream: EngineStream,
        submits: Sequence[Submit],
        *,
        info: ModelInfo,
        tokenizer: ModelTokenizer,
        stops: Sequence[str],
        shown: frozenset[int],
        metrics: RequestMetrics,
        admission: Admission,
        ledger: Ledger,
    ) -> None:
        """`shown` are special tokens that are text nevertheless."""
        first = submits[0]
        self.usage = Usage(prompt_tokens=sum(len(submit.prompt_tokens) for submit in submits))
        self.tokenizer = tokenizer
        self._stream = stream
        self._choices = [
            _Choice(TextStream(tokenizer.decoder(shown), stops)) for submit in submits for _ in submit.seeds
        ]
        self._end_tokens = frozenset(first.stop_token_ids) | frozenset(
            () if first.ignore_eos else info.eos_token_ids
        )
        self._metrics = metrics
        self._admission = admission
        self._ledger = ledger
        self._first_at: float | None = None  # when the first token of all came, by time.perf_counter()
        self._outcome = Outcome.DISCONNECTED

    def __enter__(self) -> Generation:
        self._metrics.begin()
        self._ledger.begin(self._admission.entry, self.so_far, admitted=self._admission.admitted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()
        if error is not None:
            self._outcome = self._outcome_of(error)
        settlement = self.so_far()
        if self._outcome is Outcome.DISCONNECTED:
            tokens = settlement.output_tokens
            logger.info("request %s: its client went away after %d tokens", self._admission.entry.id, tokens)
        self._ledger.settle(self._admission.entry, settlement, urgent=self._admission.awaited)
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
        arrived_at, first_at, usage = self._admission.arrived_at, self._first_at, self.usage
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

    def close(self) -> None:
        """Aborts what still runs, at once; a `next` that waits returns nothing. May be called again."""
        self._stream.close()

    async def start(self) -> None:
        """Returns when an engine has begun to work on it. Raises ApiError when none will."""
        await self._stream.wait_started()

    async def next(self) -> list[Piece]:
        """Returns what is new, as few pieces as possible; an empty list at the end, or once closed.

        Raises ApiError when a choice failed, or its engine was lost and no other came.
        """
        while deltas := await self._stream.next():
            now = time.perf_counter()
            pieces = [piece for delta in deltas if (piece := self._consume(delta, now))]
            self.usage.cached_tokens = self._stream.cached_tokens
            if pieces:
                return pieces
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
        reason = None
        if choice.text.stopped:
            reason = STOP
            self._stream.end_choice(delta.choice)
        elif delta.finish:
            text += choice.text.finish()
            reason = STOP if choice.text.stopped else _reason_of(delta)
        choice.ended = reason is not None
        tokens = self._take_shown(choice)
        if not (text or tokens or reason):
            return None
        return Piece(delta.choice, text, tokens, reason)

    def _take_tokens(self, choice: _Choice, delta: Delta) -> str:
        """Feeds the choice's text with the tokens up to the
        end token or the stop string. Returns the new text.
        """
        text = ""
        logprobs = iter(delta.logprobs)
        for token in delta.tokens:
            self.usage.completion_tokens += 1
            if token in self._end_tokens:
                break
            offset = choice.text.decoded_len
            text += choice.text.feed(token)
            if delta.logprobs:
                choice.waiting.append(TokenInfo(token, offset, next(logprobs)))
            if choice.text.stopped:
                break
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
            self._metrics.first_token(now - self._admission.arrived_at)
        choice.last_at = now


def _to_ms(seconds: float) -> int:
    return int(seconds * 1000)


def _reason_of(delta: Delta) -> str:
    """Returns OpenAI's word for how an engine ended a choice. Raises ApiError when that was no proper end."""
    if delta.finish == FinishReason.FINISH_REASON_STOP:
        return STOP
    if delta.finish == FinishReason.FINISH_REASON_LENGTH:
        return LENGTH
    if delta.finish == FinishReason.FINISH_REASON_ERROR:
        raise ApiError(
            500, delta.error or "The engine failed.", type="server_error", code="generation_failed"
        )
    if delta.finish == FinishReason.FINISH_REASON_DEADLINE:
        raise deadline_passed()
    raise unavailable(delta.error or "The engine stopped before the answer was complete. Try again.")
