"""The engine's loop: one thread that steps as long as there is something to do, and never waits for others.

Everything that it shares with other threads goes through two doors: messages come in by a queue that is
emptied between steps, and news goes out by `deliver`, once per step. The scheduler, the pools and the
runner belong to this thread alone.

A thread is enough, without a process of its own: `benchmarks/engine_core.py` runs 256 streams over a link
at 5 ms a step, and a step takes 2.6 % longer than the same work offline on a machine of two cores.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from engine.adapter_status import AdapterMemory, AdapterStatus, Residency
from engine.outputs import LinkOutput
from engine.scheduler import Scheduler
from engine.scheduler.adapter_gate import AdapterGate
from engine.scheduler.queue_bounds import Refused
from engine.sequence import Refusal, Request
from engine.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAILED_STEPS = 3
"""Steps that may fail one after another; then the device is taken for broken, and the process ends."""

Deliver = Callable[[Mapping[Hashable, LinkOutput]], None]


class PendingResult(Protocol):
    """A step that the device has been given."""

    def draw(self) -> None:
        """Launches the draw, if that has waited for the step before to be taken in."""
        ...

    def result(self) -> StepResult:
        """What it drew, once it has ended. Raises whatever has gone wrong in it."""
        ...


class StepRunner(Protocol):
    """What the loop needs of `engine.runner.Runner`."""

    def submit(self, plan: StepPlan) -> PendingResult: ...


class _FailedLaunch:
    """Stands for the result of a step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def draw(self) -> None:
        """There is nothing to draw from."""

    def result(self) -> StepResult:
        raise self._error


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """A look at the loop between two steps."""

    running: int
    waiting: int
    free_blocks: int
    residency: Mapping[bytes, Residency]
    """The fastest tier of each adapter that is in memory."""
    adapter_memory: AdapterMemory
    scheduling: Mapping[str, float]
    """`Scheduler.figures`."""


class EngineLoop:
    """Runs the steps in a thread of its own. If it cannot go on, what it has been asked is cancelled.

    Args:
        overlap: plan and launch each step while the one before runs, and read its tokens one step late.
            Worth it where `StepRunner.submit` returns before the device has ended.
        news: set by whoever has something that an idle loop should look at, such as an adapter's load that
            has ended. Cleared by the loop alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        gate: AdapterGate,
        news: threading.Event,
        *,
        overlap: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._gate = gate
        self._news = news
        self._inbox: deque[Callable[[], None]] = deque()
        self._unanswered: set[Future[Any]] = set()
        self._has_failed = False
        self._under_way: deque[tuple[StepPlan, PendingResult, float]] = deque()
        self._most_under_way = 1 if overlap else 0
        self._device_free_at = 0.0
        self._stopping = False
        self._draining = False
        self._failed_steps = 0
        self._thread: threading.Thread | None = None

    # ---- for any thread ----------------------------------------------------------------------------

    def start(self, deliver: Deliver, on_fatal: Callable[[], None]) -> None:
        """Starts the thread.

        Args:
            deliver: called there with the news of one step by link; must not block.
            on_fatal: called there when the loop cannot go on; the process should end.
        """
        self._thread = threading.Thread(
            target=self._run, args=(deliver, on_fatal), name="engine-loop", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step under way. What still runs is dropped without a word."""
        self._stopping = True
        self._news.set()
        if self._thread is not None:
            self._thread.join()

    def submit(self, request: Request) -> None:
        """Hands in a validated request; everything further comes by `deliver`."""
        self._gate.begin_load(request.adapter_digest)
        self._post(partial(self._accept, request))

    def abort(self, link: Hashable, request_id: int, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, before the next step."""
        self._post(partial(self._scheduler.abort, link, request_id, choice))

    def close_link(self, link: Hashable) -> None:
        """Ends all requests of a link before the next step."""
        self._post(partial(self._scheduler.abort_link, link))

    def drain(self) -> None:
        """Refuses whatever is submitted from now on."""
        self._post(partial(setattr, self, "_draining", True))

    def status(self) -> Future[LoopStatus]:
        """The loop's state before the next step."""
        return self._ask(self._look)

    def adapters(self) -> Future[list[AdapterStatus]]:
        """Every adapter in host or device memory."""
        return self._ask(self._gate.statuses)

    def adapter(self, digest: bytes) -> Future[AdapterStatus]:
        """One adapter; what is in no memory is said to be nowhere."""
        return self._ask(partial(self._gate.status, digest))

    def prefetch(self, digest: bytes) -> Future[str]:
        """Brings an adapter to the device when there is room. The result is "", or why it cannot be.

        Cancel it when nobody waits for it any more.
        """
        answer: Future[str] = Future()
        answer.add_done_callback(lambda _: self._news.set())
        self._post_question(partial(self._gate.prefetch, digest, answer), answer)
        return answer

    def expect(self, digest: bytes) -> None:
        """Says that a request for an adapter is on its way."""
        self._gate.begin_load(digest)
        self._post(partial(self._gate.expect, digest))

    def pin(self, digests: frozenset[bytes]) -> None:
        """Says which adapters are to be on the device and to stay there: these, and no others."""
        self._post(partial(self._gate.pin, digests))

    def unload(self, digest: bytes) -> None:
        """Forgets an adapter as soon as no sequence uses it."""
        self._post(partial(self._gate.unload, digest))

    # ---- on the loop's thread ----------------------------------------------------------------------

    def step(self, deliver: Deliver) -> bool:
        """One turn: take in what has come, plan, tell the news, launch, take in a step that has ended.

        Returns False when there was no work. News goes out just before this thread launches and waits without
        the interpreter's lock, so that the server's thread handles it then, and not while this one plans.
        """
        self._take_messages()
        plan = self._scheduler.schedule()
        self._tell(deliver)
        if plan.rows:
            self._launch(plan)
        if self._under_way and (not plan.rows or len(self._under_way) > self._most_under_way):
            self._take_in_oldest()
            self._draw_newest()
            return True
        return bool(plan.rows)

    def _run(self, deliver: Deliver, on_fatal: Callable[[], None]) -> None:
        try:
            while not self._stopping:
                if not self.step(deliver):
                    self._wait()
        except Exception:
            logger.exception("the engine's loop cannot go on")
            try:
                self._tell(deliver)
            finally:
                self._has_failed = True
                for question in list(self._unanswered):
                    question.cancel()
                on_fatal()

    def _tell(self, deliver: Deliver) -> None:
        outputs = self._scheduler.take_outputs()
        if outputs:
            deliver(outputs)

    def _launch(self, plan: StepPlan) -> None:
        """Gives a plan to the device. If it does not take it, nothing may be planned upon that plan."""
        launched = time.monotonic()
        try:
            self._under_way.append((plan, self._runner.submit(plan), launched))
        except Exception as error:
            self._under_way.append((plan, _FailedLaunch(error), launched))
            while self._under_way:
                self._take_in_oldest()

    def _draw_newest(self) -> None:
        """Lets the step under way draw what could not be drawn before the one before it was taken in."""
        if not self._under_way:
            return
        plan, pending, launched = self._under_way[-1]
        try:
            pending.draw()
        except Exception as error:
            self._under_way[-1] = plan, _FailedLaunch(error), launched
            self._take_in_oldest()

    def _take_in_oldest(self) -> None:
        """Waits for a result. A step that raises ends its own sequences; too many in a row end the loop."""
        plan, pending, launched = self._under_way.popleft()
        try:
            result = pending.result()
        except Exception as error:
            self._failed_steps += 1
            logger.exception("a step of %d sequences failed; their requests end", len(plan.rows))
            self._scheduler.fail(plan, f"the step that computed this failed: {type(error).__name__}")
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
        else:
            self._failed_steps = 0
            began, self._device_free_at = max(launched, self._device_free_at), time.monotonic()
            self._scheduler.note_time(plan, self._device_free_at - began)
            self._scheduler.update(plan, result)

    def _wait(self) -> None:
        """Sleeps until there is news, or a deadline passes: a request's, or that of a load that may hang."""
        deadlines = (self._scheduler.next_deadline, self._gate.next_look)
        deadline = min((at for at in deadlines if at is not None), default=None)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        if self._scheduler.may_start_at_once:
            timeout = 0.0
        self._news.wait(timeout)
        self._news.clear()

    def _take_messages(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _accept(self, request: Request) -> None:
        if self._draining:
            why = "this engine takes no new requests, since it is about to stop"
            self._scheduler.refuse(request, Refused(Refusal.DRAINING, why))
        else:
            self._scheduler.add(request)

    def _look(self) -> LoopStatus:
        scheduler = self._scheduler
        return LoopStatus(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_blocks=scheduler.num_free_blocks,
            residency=self._gate.residency(),
            adapter_memory=self._gate.memory(),
            scheduling=scheduler.figures(),
        )

    def _ask(self, question: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(question())

        self._post_question(answer, future)
        return future

    def _post_question(self, message: Callable[[], None], answer: Future[Any]) -> None:
        """Posts what answers a question, or cancels that, also if the loop fails in this moment."""
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._post(message)
        if self._has_failed:
            answer.cancel()

    def _post(self, message: Callable[[], None]) -> None:
        self._inbox.append(message)
        self._news.set()
