"""Chooses the work of each step, and takes in what came of it.

Every step: running decodes first, then prefill chunks in what is left of the token budget, then admissions
in the order of fairness. When blocks run short, the sequence admitted last gives its own up and waits at
the front of its tenant; the one admitted first is never the victim, so somebody always finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial

from engine.block_pool import BLOCK_SIZE, BlockPool
from engine.outputs import LinkOutput, Outputs
from engine.scheduler.adapter_gate import AdapterGate
from engine.scheduler.block_tables import BlockTables
from engine.scheduler.fairness import VirtualTokenCounters
from engine.scheduler.queue_bounds import QueueBounds, Refused
from engine.scheduler.roster import Roster
from engine.scheduler.rows import make_row
from engine.scheduler.turns import steps_to_leave
from engine.scheduler.waiting import WaitingQueue
from engine.sequence import FinishReason, Request, Sequence, Status
from engine.step import RowResult, StepPlan, StepResult, StepRow

UNKNOWN_TOKEN = "the request has a token that neither the model nor the adapter has"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of a step and of the queue.

    Raises:
        ValueError: when a step could not hold one token of every running sequence.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}): every running sequence takes a token of each step"
            )


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    budget: int
    rows: list[StepRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """The sole writer of sequences and queues. Not thread-safe: it lives on the loop's thread.

    Call `schedule`, run its plan, and then `update` with the result or `fail` with the reason, in the order
    of the plans. One plan may be under way when the next is made: a step's tokens are then unknown here, and
    sequences go on without (`engine.step.UNSEEN`). Whoever turns out to have ended by such a token, or is
    ended or preempted meanwhile, gives its blocks and pages back at once, though a step under way still
    writes and reads them. That is safe because the device runs steps, and whatever is copied for them, in
    the order of their plans: what the next owner writes comes later. What such a row draws is told nobody.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        gate: AdapterGate,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_preemptions = 0
        self._limits = limits
        self._pool = pool
        self._gate = gate
        self._clock = clock
        self._tables = BlockTables(pool)
        self._counters = VirtualTokenCounters()
        self._waiting = WaitingQueue(self._counters)
        self._running: list[Sequence] = []
        self._roster = Roster()
        self._outputs = Outputs()
        self._bounds = QueueBounds(limits.max_num_waiting, clock)

    # ---- what others ask ---------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run yet, or not any more; further choices included."""
        return len(self._roster) - len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_idle

    @property
    def next_deadline(self) -> float | None:
        """When `schedule` should be called even if nothing else happens, on the scheduler's clock."""
        return self._roster.next_deadline

    @property
    def is_loading(self) -> bool:
        """Whether the end of an adapter's load may give an empty plan work."""
        return self._gate.is_loading

    def take_outputs(self) -> dict[Hashable, LinkOutput]:
        """What there is to tell each link since the last call."""
        return self._outputs.take()

    # ---- requests come and go ----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. It has been validated; its key is not in use; it fits into the pool alone."""
        assert request.max_len <= self._pool.num_blocks * BLOCK_SIZE, "the request could never finish"
        assert len(request.sampling) <= self._limits.max_num_seqs, "the request could never start"
        running = sum(seq.request.tenant == request.tenant for seq in self._running)
        held = self._roster.num_of_tenant(request.tenant) - running
        count = len(request.sampling)
        if refused := self._bounds.refused(request.tenant, count, waiting=self.num_waiting, held=held):
            return self.refuse(request, refused)
        leader, *siblings = self._roster.enlist(request)
        self._attach(siblings, leader)
        self._waiting.push(leader)
        if len(leader.tokens) >= request.max_len:
            self._end_all([leader, *siblings], FinishReason.LENGTH)
        else:
            self._gate.want(request.adapter_digest)

    def refuse(self, request: Request, refused: Refused) -> None:
        """Ends a request that was never added; another engine may take it."""
        self._outputs.refused(request, refused.refusal, refused.why, refused.retry_after_s)

    def abort(self, link: Hashable, request_id: int, choice: int | None = None) -> None:
        """Ends a request, or one choice of it; what it held is free at once. Unknown ones are ignored."""
        sequences = self._roster.of_request(link, request_id)
        wanted = [seq for seq in sequences if choice is None or seq.choice == choice]
        self._end_all(wanted, FinishReason.ABORTED)

    def abort_link(self, link: Hashable) -> None:
        """Ends all requests of a link that is no more; nobody is told."""
        self._end_all(self._roster.of_link(link), FinishReason.ABORTED)
        self._outputs.drop(link)

    # ---- the step ----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step. It is empty when nobody is here, or all that are wait for an adapter."""
        self._end_all(self._roster.take_overdue(self._clock()), FinishReason.DEADLINE)
        has_yielded = self._yield_pages()
        self._gate.begin_step(self._waiting.count, idle=not self._running)
        self._end_failed_adapters()
        step = _Step(self._limits.max_num_batched_tokens)
        all_fit = self._plan_decodes(step)
        self._plan_prefills(step)
        if all_fit and not has_yielded:
            self._admit(step)
            self._end_failed_adapters()
        return StepPlan(tuple(step.rows), tuple(step.copies))

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in a step that has run: new tokens, blocks that are full now, sequences that end."""
        outcomes, find = iter(result.rows), self._roster.get
        for row in plan.rows:
            outcome = next(outcomes) if row.sampling is not None else None
            seq = find(row.seq_id)
            if seq is None:
                continue
            if outcome is not None:
                seq.num_unseen -= 1
                if outcome.error is not None:
                    self._end_spoiled(seq, outcome.error)
                    continue
            if seq.status is Status.RUNNING:
                num_tokens = row.start + len(row.tokens)
                if num_tokens // BLOCK_SIZE > seq.num_published:
                    self._tables.publish(seq, num_tokens)
            if outcome is not None:
                self._take_token(seq, outcome)

    def fail(self, plan: StepPlan, why: str) -> None:
        """Ends every sequence of a step that did not run to its end; nothing that it wrote is trusted."""
        for row in plan.rows:
            seq = self._roster.get(row.seq_id)
            if seq is not None:
                self._end_spoiled(seq, why)

    def check(self) -> None:
        """Asserts the invariants of everything that sequences hold. Call it between steps."""
        self._pool.check(seq.block_ids for seq in self._running)
        self._gate.check([seq.request.adapter_digest for seq in self._running if seq.adapter is not None])
        waiting = list(self._waiting)
        attached = [sibling for seq in (*self._running, *waiting) for sibling in seq.siblings]
        everyone = [*self._running, *waiting, *attached]
        assert sorted(s.seq_id for s in everyone) == sorted(s.seq_id for s in self._roster), "one is lost"
        assert all(seq.status is Status.RUNNING for seq in self._running)
        assert all(seq.status is Status.WAITING for seq in waiting)
        assert all(seq.status is Status.ATTACHED for seq in attached)
        assert not any(seq.block_ids or seq.adapter for seq in (*waiting, *attached)), "holds while waiting"
        assert self._num_seats() <= self._limits.max_num_seqs

    # ---- planning ----------------------------------------------------------------------------------

    def _plan_decodes(self, step: _Step) -> bool:
        """Adds a row for each running sequence that lacks one token. Returns whether none was preempted."""
        running, all_fit, index = self._running, True, 0
        while index < len(running):
            seq = running[index]
            length = len(seq.tokens) + seq.num_unseen
            if length - seq.num_computed == 1 and length < seq.request.max_len:
                if not self._tables.prepare_write(seq, step.copies):
                    self._preempt(running[-1])
                    all_fit = False
                    continue
                self._plan_row(step, seq, 1)
            index += 1
        return all_fit

    def _plan_prefills(self, step: _Step) -> None:
        """Adds the next chunk of each running sequence that lacks more, in the order of admission."""
        if len(step.rows) == len(self._running):
            return
        planned = {row.seq_id for row in step.rows}
        for seq in self._running:
            if step.budget > 0 and seq.seq_id not in planned and not seq.is_ending:
                self._plan_row(step, seq, min(seq.num_missing, step.budget))

    def _admit(self, step: _Step) -> None:
        """Starts waiting sequences while there are budget, seats, blocks and pages.

        Who has no adapter here steps aside; who has no seat or no blocks stops the admission, so that
        small requests cannot keep a large one waiting.
        """
        if step.budget <= 0 or not self._waiting:
            return
        seats = self._limits.max_num_seqs - self._num_seats()
        for seq in self._waiting.fair_order():
            if step.budget <= 0:
                return
            # Asked even when no seat is free, so that an adapter is fetched while its sequence waits for one.
            leaving = partial(self._steps_to_leave, seq.request.tenant)
            if not self._gate.is_open(seq.request.adapter_digest, leaving):
                continue
            if seq.request.vocab_size > self._gate.vocab_size(seq.request.adapter_digest):
                self._end_all([seq, *seq.siblings], FinishReason.ERROR, UNKNOWN_TOKEN)
                continue
            if 1 + len(seq.siblings) > seats:
                return
            if not self._tables.admit(seq, num_running=len(self._running)):
                return
            seats -= 1 + len(seq.siblings)
            self._start(seq)
            self._plan_row(step, seq, min(seq.num_missing, step.budget))

    def _plan_row(self, step: _Step, seq: Sequence, count: int) -> None:
        """Adds the next tokens of a sequence to the step, and charges them."""
        row = make_row(seq, count)
        step.rows.append(row)
        step.budget -= count
        seq.num_computed += count
        if row.sampling is not None:
            seq.num_unseen += 1
        if seq.num_charged < seq.num_given:
            paid = min(seq.num_computed, seq.num_given)
            if paid > seq.num_charged:
                self._counters.charge_input(seq.request.tenant, paid - seq.num_charged)
                seq.num_charged = paid

    def _steps_to_leave(self, claimant: str) -> dict[bytes, int]:
        """By adapter, after how many steps its sequences can make room for one of a tenant; see `turns`."""
        served = self._counters.account(claimant).served
        return steps_to_leave(
            self._running,
            lambda seq: self._counters.account(seq.request.tenant).served >= served,
            is_cached=self._pool.has_prefix_cache,
        )

    def _yield_pages(self) -> bool:
        """Lets sequences whose turn is over make room for the adapter that claims their pages."""
        claim = self._gate.claim
        if claim is None:
            return False
        digest, victims = claim
        claimant = self._waiting.least_served(digest)
        if claimant is None:
            return False
        leaving = self._steps_to_leave(claimant)
        ready = sorted(victim for victim in victims if leaving.get(victim, 1) <= 0)
        for victim in ready:
            self._gate.note_yield()
            for seq in [seq for seq in self._running if seq.request.adapter_digest == victim]:
                self._stop_running(seq)
                self._wait_again(seq, "yields", order=(1, seq.request.priority, self._roster.take_ticket()))
        return bool(ready)

    def _num_seats(self) -> int:
        """Running sequences, and those that will run without another admission."""
        return sum(1 + len(seq.siblings) for seq in self._running)

    # ---- changes of state --------------------------------------------------------------------------

    def _start(self, seq: Sequence) -> None:
        """Makes a waiting sequence that has its blocks run."""
        self._waiting.remove(seq)
        seq.adapter = self._gate.acquire(seq.request.adapter_digest)
        seq.num_charged = max(seq.num_charged, min(seq.num_computed, seq.num_given))
        seq.num_at_start = len(seq.tokens) + seq.num_unseen
        seq.set_status(Status.RUNNING)
        self._running.append(seq)
        if self._roster.mark_started(seq.request):
            self._bounds.note_start(seq.request.tenant, len(seq.request.sampling))
            queue_us = max(0, int((self._clock() - seq.request.arrival) * 1e6))
            cached = min(seq.num_computed, seq.num_prompt)
            self._outputs.started(seq.request, cached_tokens=cached, queue_us=queue_us)

    def _take_token(self, seq: Sequence, outcome: RowResult) -> None:
        """Appends a token to a sequence, and ends it if that was the last."""
        assert outcome.seq_id == seq.seq_id, "results are not in the plan's order"
        if seq.siblings and seq.status is Status.RUNNING:
            self._fork_siblings(seq)
        request, token = seq.request, outcome.token
        seq.tokens.append(token)
        self._outputs.token(seq, token, outcome.logprobs)
        self._counters.charge_output(request.tenant)
        if token in request.stop_token_ids:
            self._end(seq, FinishReason.STOP)
        elif len(seq.tokens) >= request.max_len:
            self._end(seq, FinishReason.LENGTH)

    def _attach(self, siblings: list[Sequence], leader: Sequence) -> None:
        for sibling in siblings:
            sibling.set_status(Status.ATTACHED)
        leader.siblings = siblings

    def _fork_siblings(self, leader: Sequence) -> None:
        """Lets the further choices run from the prompt that the leader has computed."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            self._tables.fork(leader, sibling)
            sibling.adapter = self._gate.acquire(leader.request.adapter_digest)
            sibling.num_charged = sibling.num_given
            sibling.num_at_start = len(sibling.tokens)
            sibling.set_status(Status.RUNNING, "forked")
            self._running.append(sibling)

    def _preempt(self, seq: Sequence) -> None:
        """Takes everything from a running sequence and puts it to the front of its tenant."""
        self.num_preemptions += 1
        self._stop_running(seq)
        self._wait_again(seq, "preempted")

    def _wait_again(self, seq: Sequence, why: str, *, order: tuple[int, int, int] | None = None) -> None:
        """Queues a sequence once more: at the front of its tenant's, unless the order says where."""
        seq.order = order or (0, seq.request.priority, seq.seq_id)
        seq.set_status(Status.WAITING, why)
        self._waiting.push(seq)

    def _stop_running(self, seq: Sequence, *, spoiled: bool = False) -> None:
        """The only way out of the running list: blocks and the adapter's reference are given back."""
        self._running.remove(seq)
        self._tables.release(seq, spoiled=spoiled)
        if seq.adapter is not None:
            self._gate.release(seq.request.adapter_digest)
            seq.adapter = None

    def _end(self, seq: Sequence, reason: FinishReason, error: str = "", *, spoiled: bool = False) -> None:
        """The only way out of the engine, from whatever state. The first of the siblings takes over."""
        if seq.status is Status.RUNNING:
            self._stop_running(seq, spoiled=spoiled)
        elif seq.status is Status.WAITING:
            self._waiting.remove(seq)
            if spoiled:  # preempted while the step that spoiled it was under way
                self._tables.forget(seq)
        else:
            self._detach(seq)
        seq.set_status(Status.FINISHED, reason.name)
        self._roster.strike(seq)
        self._outputs.finished(seq.request, seq.choice, reason, error)
        if seq.siblings:
            heir, *others = seq.siblings
            seq.siblings = []
            heir.siblings = others
            heir.num_charged = seq.num_charged
            self._wait_again(heir, "leads now")

    def _detach(self, seq: Sequence) -> None:
        for other in self._roster.of_request(*seq.request.key):
            if seq in other.siblings:
                other.siblings.remove(seq)

    def _end_all(self, sequences: Iterable[Sequence], reason: FinishReason, error: str = "") -> None:
        """Ends several sequences, attached ones first, so that none takes over from another in vain."""
        for seq in sorted(sequences, key=lambda seq: seq.status is not Status.ATTACHED):
            self._end(seq, reason, error)

    def _end_spoiled(self, seq: Sequence, why: str) -> None:
        """Ends a sequence whose results cannot be trusted, and those that would start from them."""
        for sibling in list(seq.siblings):
            self._end(sibling, FinishReason.ERROR, why)
        self._end(seq, FinishReason.ERROR, why, spoiled=True)

    def _end_failed_adapters(self) -> None:
        """Ends the waiting sequences whose adapter could not be brought; attached ones with their leader."""
        for failure in self._gate.take_failures():
            leaders = [seq for seq in self._waiting if seq.request.adapter_digest == failure.digest]
            for leader in leaders:
                self._end_all([leader, *leader.siblings], FinishReason.ERROR, failure.reason)
