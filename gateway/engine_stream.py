"""One client's request on the engines: the tokens of its
choices as they come, from whichever engine runs them.

A choice's state is its seed and the tokens received so far, and the noise of a draw depends on (seed,
position, token) alone. So when a link breaks, each unfinished choice is submitted anew with its tokens, to
any engine of the same model, and goes on as if nothing had happened. Not without end: one that is the reason
why engines die would walk through all there are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from gateway.engine_link import EngineLink
from gateway.errors import ApiError
from gateway.refusals import deadline_passed, engine_lost, lost_too_often, no_engine, refused_by_all
from protos.engine_pb2 import Failure, Finished, FinishReason, LinkRequest, Started, Submit, TokenLogprobs

logger = logging.getLogger(__name__)

_REFUSAL_MEMORY_S = 1.0
# An engine ends a request at its deadline by itself; one that says nothing for so long after it has stopped.
_DEADLINE_GRACE_S = 2.0

_MOST_LOSSES = 3
"""Engines that may be lost while they compute one choice."""

MOST_AT_ONCE = 256
"""Choices of a request that engines have at a time. Of more prompts the next take their turn as others end,
so that one request does not fill a queue in which others wait."""


class Placer(Protocol):
    """Chooses engines; the fleet."""

    def choose(self, submit: Submit, model_digest: bytes, excluded: set[str]) -> EngineLink | None:
        """Returns the link that should take a request now, or None when there is none but the excluded."""
        ...

    async def changed(self, timeout_s: float) -> None:
        """Returns when an engine came or went, or after the time."""
        ...


@dataclass(slots=True)
class Delta:
    """What is new of one choice: tokens in order, their logprobs if asked for, how it ended if it did."""

    choice: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED
    error: str = ""
    failure: Failure = Failure.FAILURE_UNSPECIFIED
    dropped: int = 0
    """Tokens that were drawn for it beside its own, and are in no choice."""


@dataclass(slots=True)
class _Choice:
    submit: Submit  # of its prompt, whose choices share it and follow one another; never changed
    prompt: int  # the prompt's number
    seed: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    is_computed: bool = False  # by the engine that has it now; else it waits there
    losses: int = 0  # of engines that computed it
    link: EngineLink | None = None
    request_id: int = 0
    wire_choice: int = 0


class EngineStream:
    """The choices of one request, numbered through all its prompts. For one consumer, which must `close` it.

    Nothing is sent before `begin`, or else the first `wait_started` or `next`.
    """

    def __init__(
        self,
        submits: Sequence[Submit],
        *,
        model_digest: bytes,
        placer: Placer,
        resume_timeout_s: float,
        deadline: float,
    ) -> None:
        """`submits`, one per prompt, have everything but a request id and a deadline. They are not modified.

        `deadline`: when the request must have ended, by `time.monotonic`; waiting for an engine counts.
        """
        self.cached_tokens = 0
        self.queue_s: float | None = None
        """How long it waited in the queue of the first engine that ran it; None until one does."""
        self.engine_id = ""
        """The engine that it was given to last."""
        self._choices = [
            _Choice(submit, number, seed) for number, submit in enumerate(submits) for seed in submit.seeds
        ]
        self._has_logprobs = submits[0].sampling.HasField("logprobs")
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._vectors: dict[int, bytes] = {}
        self._unplaced = set(range(len(self._choices)))
        self._placed: set[int] = set()  # by choices that have not ended
        self._model_digest = model_digest
        self._placer = placer
        self._resume_timeout_s = resume_timeout_s
        self._deltas: dict[int, Delta] = {}
        self._counted: set[int] = set()
        self._started = False
        self._accepted = False  # an engine had it once: then it is worth waiting for another
        self._give_up_at: float | None = None  # for finding one; time.monotonic()
        self._deadline = deadline
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = False
        self._refused_by: dict[str, Finished] = {}
        self._wakeup: asyncio.Future[None] | None = None

    @property
    def unread(self) -> int:
        """How many tokens have come, and `next` has not returned them."""
        return sum(len(delta.tokens) for delta in self._deltas.values())

    @property
    def is_overdue(self) -> bool:
        """Whether its deadline has passed."""
        return time.monotonic() >= self._deadline

    def prompt_logprobs(self, prompt: int) -> Sequence[TokenLogprobs]:
        """Returns those of all tokens of a prompt but the first; of those so far before the first token."""
        return self._prompt_logprobs.get(prompt, ())

    @property
    def vectors(self) -> Sequence[bytes]:
        """Those of all prompts, in order, where vectors were asked for and all have come."""
        return [self._vectors[choice] for choice in range(len(self._choices))]

    def begin(self) -> None:
        """Gives engines at once what they can take. What stands in the way is told by who waits. After
        `close`, which a client that has gone may have called, nothing is sent.
        """
        if self._closed:
            return
        self._set_alarm()
        while self._may_place and time.monotonic() < self._deadline and self._submit_next():
            pass

    @property
    def end_in_queue(self) -> Delta | None:
        """A choice that has ended while none had left an engine's queue; None where there is none."""
        if self._started:
            return None
        return next((delta for delta in self._deltas.values() if delta.finish), None)

    async def wait_started(self) -> None:
        """Returns when the first choice has left an engine's queue, or has ended. Raises as `next`."""
        while not (self._started or self._deltas or self._closed):
            await self._advance()

    async def next(self) -> list[Delta]:
        """Returns what is new, at least one delta; an empty
        list when all choices have ended, or after `close`.

        Raises ApiError 503 when no engine takes the request, and none came in time to continue a lost one;
        429 when the tenant's own queue is full; 504 when its time is over.
        """
        while not (self._deltas or self._closed or all(choice.ended for choice in self._choices)):
            await self._advance()
        if self._closed:
            return []
        deltas, self._deltas = self._deltas, {}
        return list(deltas.values())

    def end_choice(self, index: int) -> None:
        """Ends one choice early; nothing more is returned for it."""
        choice = self._choices[index]
        if choice.ended:
            return
        choice.ended = True
        self._unplaced.discard(index)
        self._placed.discard(index)
        if choice.link is not None:
            choice.link.abort(choice.request_id, choice.wire_choice)

    def close(self) -> None:
        """Aborts whatever still runs, at once, and ends a `next` that waits. May be called again, and before
        `begin`.
        """
        self._closed = True
        self._unplaced.clear()
        if self._alarm is not None:
            self._alarm.cancel()
        running = {(choice.link, choice.request_id) for choice in self._choices if not choice.ended}
        for choice in self._choices:
            choice.ended = True
        for link, request_id in running:
            if link is not None:
                link.abort(request_id)
        self._wake()

    # ---- what the link calls ------------------------------------------------------------------------

    def on_tokens(self, choice: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """See Receiver. Logprobs may be there that only others have asked for."""
        delta = self._delta(choice)
        delta.tokens += tokens
        if self._has_logprobs:
            delta.logprobs += logprobs
        self._choices[choice].tokens += tokens

    def on_prompt_logprobs(self, choice: int, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """See Receiver. A prompt that is computed again, elsewhere, is told again."""
        known = self._prompt_logprobs.setdefault(self._choices[choice].prompt, [])
        known[start - 1 : start - 1 + len(logprobs)] = logprobs

    def on_searched(self, choice: int, tokens: int) -> None:
        """See Receiver. What is drawn costs nothing but its tokens; see `gateway.beam_stream.BeamStream`."""

    def on_vector(self, choice: int, values: bytes) -> None:
        """See Receiver."""
        self._vectors[choice] = values

    def on_started(self, choices: Sequence[int], started: Started) -> None:
        """See Receiver. A prompt's cached tokens count once, however often it is submitted."""
        if choices[0] not in self._counted:
            self._counted.update(choices)
            self.cached_tokens += started.cached_tokens
        if self.queue_s is None:
            self.queue_s = started.queue_us / 1e6
        self._started = self._accepted = True
        for choice in choices:
            self._choices[choice].is_computed = True
        self._give_up_at = None
        self._wake()

    def on_finished(self, choice: int, finished: Finished) -> None:
        """See Receiver."""
        state = self._choices[choice]
        if finished.reason == FinishReason.FINISH_REASON_REFUSED:
            assert state.link is not None
            self._refused_by[state.link.engine_id] = finished
            self._displace([choice])
            return
        state.ended = True
        self._placed.discard(choice)
        delta = self._delta(choice)
        delta.finish, delta.error, delta.failure = finished.reason, finished.error, finished.failure

    def on_lost(self, choices: Sequence[int]) -> None:
        """See Receiver. After each loss there is time anew to find another engine."""
        self._accepted = True
        self._give_up_at = None
        for choice in choices:
            state = self._choices[choice]
            state.losses += state.is_computed
            state.is_computed = False
        self._displace(choices)

    def _displace(self, choices: Sequence[int]) -> None:
        for index in choices:
            self._choices[index].link = None
        self._placed.difference_update(choices)
        self._unplaced.update(choices)
        self._wake()

    def _delta(self, choice: int) -> Delta:
        delta = self._deltas.get(choice)
        if delta is None:
            delta = self._deltas[choice] = Delta(choice)
            self._wake()
        return delta

    # ---- placing ------------------------------------------------------------------------------------

    async def _advance(self) -> None:
        """Places what is unplaced, else waits for anything to happen."""
        if time.monotonic() >= self._deadline + _DEADLINE_GRACE_S:
            raise deadline_passed()
        if self._may_place:
            await self._place()
            return
        self._wakeup = asyncio.get_running_loop().create_future()
        await self._wakeup

    @property
    def _may_place(self) -> bool:
        return bool(self._unplaced) and len(self._placed) < MOST_AT_ONCE

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def _place(self) -> None:
        """Submits unplaced choices, as many as may run at once. Waits for an engine only to continue a
        request that one had accepted.
        """
        self._set_alarm()
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + self._resume_timeout_s
        while self._may_place and not self._closed:
            now = time.monotonic()
            if now >= self._deadline:
                raise deadline_passed()
            if self._submit_next():
                continue
            left_s = self._give_up_at - now
            if not self._accepted or left_s <= 0:
                raise self._nobody()
            await self._placer.changed(min(left_s, self._deadline - now, _REFUSAL_MEMORY_S))
            self._refused_by.clear()

    def _set_alarm(self) -> None:
        if self._alarm is None:
            after_s = self._deadline + _DEADLINE_GRACE_S - time.monotonic()
            self._alarm = asyncio.get_running_loop().call_later(after_s, self._wake)

    def _submit_next(self) -> bool:
        """Makes the next submission, before the deadline. Returns whether there is an engine for it."""
        choices, message = self._next_to_place()
        self._check_losses(choices)
        message.submit.deadline_ms = max(1, round(1000 * (self._deadline - time.monotonic())))
        link = self._placer.choose(message.submit, self._model_digest, set(self._refused_by))
        if link is None:
            return False
        request_id = link.submit(message, self, choices)
        for wire_choice, index in enumerate(choices):
            state = self._choices[index]
            state.link, state.request_id, state.wire_choice = link, request_id, wire_choice
        self.engine_id = link.engine_id
        self._unplaced.difference_update(choices)
        self._placed.update(choices)
        return True

    def _check_losses(self, choices: Sequence[int]) -> None:
        """Raises ApiError 500 for what may be the reason why engines were lost."""
        if max(self._choices[choice].losses for choice in choices) < _MOST_LOSSES:
            return
        submit = self._choices[choices[0]].submit
        adapter = submit.adapter_digest.hex()[:12] or "none"
        logger.error(
            "%d engines were lost that computed a request of tenant %s with adapter %s: no other gets it",
            *(_MOST_LOSSES, submit.tenant, adapter),
        )
        raise lost_too_often(_MOST_LOSSES)

    def _next_to_place(self) -> tuple[list[int], LinkRequest]:
        """Returns the choices of one submission, and it: a
        prompt's choices without tokens together, others alone.
        """
        first = min(self._unplaced)
        state = self._choices[first]
        message = LinkRequest(submit=state.submit)  # a copy, and the only one: prompts may be long
        submit = message.submit
        if state.tokens:
            submit.seeds[:] = [state.seed]
            submit.output_tokens.extend(state.tokens)
            submit.ClearField("prompt_logprobs")  # told before the first token
            return [first], message
        own = takewhile(
            lambda index: self._choices[index].submit is state.submit, range(first, len(self._choices))
        )
        together = [index for index in own if index in self._unplaced and not self._choices[index].tokens]
        if len(together) < len(submit.seeds):
            submit.seeds[:] = [self._choices[index].seed for index in together]
        return together, message

    def _nobody(self) -> ApiError:
        if self._refused_by:
            return refused_by_all(self._refused_by.values())
        return engine_lost() if self._accepted else no_engine()
