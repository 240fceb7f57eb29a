"""Chooses the work of each step, and takes in what came of it.

Every step: running decodes first, then prefill chunks and admissions in the order of fairness, in what is
left of the token budget. When blocks run short, the sequence admitted last gives its own up and waits at
the front of its tenant; the one admitted first is never the victim, so somebody always finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from engine.block_pool import BLOCK_SIZE, BlockPool
from engine.outputs import LinkOutput
from engine.scheduler.adapter_gate import AdapterGate
from engine.scheduler.background import is_background
from engine.scheduler.block_tables import BlockTables
from engine.scheduler.fairness import VirtualTokenCounters
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.lives import Lives
from engine.scheduler.prompt_budget import PromptBudget
from engine.scheduler.queue_bounds import QueueBounds, Refused
from engine.scheduler.room import Room
from engine.scheduler.rows import make_row
from engine.scheduler.searches import Searches
from engine.sequence import FinishReason, Request, Sequence, Status
from engine.step import StepPlan, StepResult, StepRow

SHORT_STEPS = 4
"""Steps without prompts of others, while one waits for its adapter of whose tenant nothing runs."""
UNKNOWN_TOKEN = "the request has a token that neither the model nor the adapter has"


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    budget: int
    chunk_budget: int
    """Of the budget: tokens of prompts, but for those of tenants of which nothing ran."""
    rows: list[StepRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def room(self, *, is_newcomer: bool) -> int:
        """How many tokens of a prompt it may still have; none if not above 0."""
        return self.budget if is_newcomer else min(self.budget, self.chunk_budget)


class Scheduler:
    """Plans the steps. Not thread-safe: it lives on the loop's thread.

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
        self._limits = limits
        self._pool = pool
        self._gate = gate
        self._clock = clock
        self._tables = BlockTables(pool)
        self._counters = VirtualTokenCounters()
        self._bounds = QueueBounds(limits.max_num_waiting, clock)
        self._prompt_budget = PromptBudget(limits.max_num_batched_tokens, spread=limits.spread_prompts)
        self._lives = Lives(self._tables, gate, self._counters, self._bounds, clock)
        self._searches = Searches(self._lives)
        self._running = self._lives.running
        self._waiting = self._lives.waiting
        self._roster = self._lives.roster
        self._room = Room(limits.max_num_seqs, self._lives, pool, gate)

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
    def num_preemptions(self) -> int:
        """Times that a sequence gave up its blocks, since others needed them to go on."""
        return self._lives.num_preemptions

    @property
    def next_deadline(self) -> float | None:
        """When `schedule` should be called even if nothing else happens, on the scheduler's clock."""
        return self._roster.next_deadline

    @property
    def is_loading(self) -> bool:
        """Whether the end of an adapter's load may give an empty plan work."""
        return self._gate.is_loading

    @property
    def may_start_at_once(self) -> bool:
        """Whether the plan after an empty one may have work, though nothing comes in between: no adapter is
        loaded that all could wait for, or somebody stepped back, who may start in the next plan only.
        """
        return bool(self._lives.stepped_back) or (self.num_waiting > 0 and not self.is_loading)

    def figures(self) -> dict[str, float]:
        """How fair it is now, and what has happened in the queue since the start, by name."""
        return {
            "fairness_gap": self._counters.gap(),
            "preemptions": self._lives.num_preemptions,
            "seat_yields": self._lives.num_yields,
            **self._bounds.figures(),
        }

    def take_outputs(self) -> dict[Hashable, LinkOutput]:
        """What there is to tell each link since the last call."""
        return self._lives.outputs.take()

    # ---- requests come and go ----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. It has been validated; its key is not in use; it fits into the pool alone."""
        assert request.most_blocks <= self._pool.num_blocks, "the request could never finish"
        assert len(request.sampling) <= self._limits.max_choices, "the request could never start"
        held = self._roster.num_of_tenant(request.tenant) - self._counters.num_running(request.tenant)
        count = len(request.sampling)
        if refused := self._bounds.refused(request.tenant, count, waiting=self.num_waiting, held=held):
            self.refuse(request, refused)
        else:
            self._lives.queue(request)

    def refuse(self, request: Request, refused: Refused) -> None:
        """Ends a request that was never added; another engine may take it."""
        self._lives.outputs.refused(request, refused.refusal, refused.why, refused.retry_after_s)

    def abort(self, link: Hashable, request_id: int, choice: int | None = None) -> None:
        """Ends a request, or one choice of it; what it held is free at once. Unknown ones are ignored.

        A search has no choices before its end, so it ends as a whole.
        """
        sequences = self._roster.of_request(link, request_id)
        wanted = [seq for seq in sequences if choice in (None, seq.choice) or seq.search is not None]
        self._lives.end_all(wanted, FinishReason.ABORTED)

    def abort_link(self, link: Hashable) -> None:
        """Ends all requests of a link that is no more; nobody is told."""
        self._lives.end_all(self._roster.of_link(link), FinishReason.ABORTED)
        self._lives.outputs.drop(link)

    # ---- the step ----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step. It is empty when nobody is here, or all that are wait for an adapter."""
        self._lives.begin_step()
        self._lives.end_all(self._roster.take_overdue(self._clock()), FinishReason.DEADLINE)
        self._gate.begin_step(self._waiting.count, idle=not self._running)
        self._lives.end_failed_adapters()
        self._room.make()
        budget = self._limits.max_num_batched_tokens
        step = _Step(budget, chunk_budget=budget)
        all_fit = self._plan_decodes(step)
        chunks = self._unfinished_prompts(step)
        step.chunk_budget = self._chunk_budget(len(step.rows), chunks)
        self._plan_prompts(step, chunks, admits=all_fit)
        self._lives.end_failed_adapters()
        for tenant, tokens in self._gate.take_bills():
            self._counters.charge_load(tenant, tokens)
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
                if seq.search is None:
                    seq.num_unseen -= 1
                if outcome.error is not None:
                    self._lives.end_spoiled(seq, outcome.error)
                    continue
            if row.scoring is not None:
                start = row.start + row.scoring.first + 1
                self._lives.take_prompt_logprobs(seq, start, result.prompt_logprobs[row.seq_id])
            if row.seq_id in result.vectors:
                self._lives.take_vector(seq, row.start, result.vectors[row.seq_id])
            if seq.status is Status.RUNNING:
                num_tokens = row.start + len(row.tokens)
                if num_tokens // BLOCK_SIZE > seq.num_published:
                    self._tables.publish(seq, num_tokens)
            if outcome is None:
                continue
            if seq.search is None:
                self._lives.take_token(seq, outcome)
            else:
                self._searches.take(seq, outcome)

    def note_time(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken the device so long; what the next ones hold depends on it."""
        num_decodes = sum(len(row.tokens) == 1 for row in plan.rows)
        num_tokens = sum(len(row.tokens) for row in plan.rows)
        self._prompt_budget.note(num_decodes, num_tokens - num_decodes, seconds)

    def fail(self, plan: StepPlan, why: str) -> None:
        """Ends every sequence of a step that did not run to its end; nothing that it wrote is trusted."""
        for row in plan.rows:
            seq = self._roster.get(row.seq_id)
            if seq is not None:
                self._lives.end_spoiled(seq, why)

    def check(self) -> None:
        """Asserts the invariants of everything that sequences hold. Call it between steps."""
        self._pool.check(seq.block_ids for seq in self._running)
        self._gate.check([seq.request.adapter_digest for seq in self._running if seq.adapter is not None])
        self._lives.check()
        self._searches.check(self._running)
        assert self._lives.num_seats <= self._limits.max_num_seqs

    # ---- planning ----------------------------------------------------------------------------------

    def _plan_decodes(self, step: _Step) -> bool:
        """Adds a row for each running sequence that lacks one token. Returns whether none was preempted."""
        running, all_fit, index = self._running, True, 0
        while index < len(running):
            seq = running[index]
            length = len(seq.tokens) + seq.num_unseen
            lacks_one = length - seq.num_computed == 1 and length < seq.request.max_len
            if seq.search is not None and seq.leads:
                fits = self._tables.prepare_beams(seq.search.running, step.copies)
            else:
                fits = not lacks_one or self._tables.prepare_write(seq, step.copies)
            if not fits:
                self._lives.preempt(self._last_to_stay(index))
                all_fit = False
                continue
            if lacks_one:
                self._plan_row(step, seq, 1)
            index += 1
        return all_fit

    def _last_to_stay(self, index: int) -> Sequence:
        """Who is preempted of those running from ``index`` on: background work, else the last admitted."""
        candidates = reversed(self._running[index:])
        return next((seq for seq in candidates if is_background(seq.request.tenant)), self._running[-1])

    def _plan_prompts(self, step: _Step, chunks: list[Sequence], *, admits: bool) -> None:
        """Adds chunks of prompts: of running sequences, and of those that it admits, in the fair order.

        So a prompt of many chunks delays others of its tenant, and tenants that were served more; a chunk of
        one that was served less comes before it.
        """
        if admits and step.budget > 0:
            seats = self._limits.max_num_seqs - self._lives.num_seats
            for seq in self._waiting.fair_order(self._gate.here()):
                account = self._counters.account(seq.request.tenant)
                while chunks and self._counters.account(chunks[-1].request.tenant).rank <= account.rank:
                    self._plan_chunk(step, chunks.pop())
                is_newcomer = not (account.num_running or account.is_background)
                if step.room(is_newcomer=is_newcomer) <= 0:
                    break
                # Asked even when no seat is free, so that an adapter is fetched while its sequence waits.
                if not self._may_start(seq):
                    continue
                seats -= seq.num_seats
                if seats < 0 or not self._tables.admit(seq, num_running=len(self._running)):
                    break
                self._lives.start(seq)
                self._plan_chunk(step, seq, is_newcomer=is_newcomer)
        while chunks:
            self._plan_chunk(step, chunks.pop())

    def _unfinished_prompts(self, step: _Step) -> list[Sequence]:
        """The running sequences that lack more than a token; who is next comes last."""
        if len(step.rows) == len(self._running):
            return []
        planned = {row.seq_id for row in step.rows}
        chunks = [seq for seq in self._running if seq.seq_id not in planned and not seq.is_ending]
        chunks.sort(key=lambda seq: self._counters.account(seq.request.tenant).rank)
        return chunks[::-1]

    def _may_start(self, seq: Sequence) -> bool:
        """Whether a waiting sequence lacks a seat and blocks at most. Ends one that could never run."""
        # A step under way may have a row of it.
        if seq.seq_id in self._lives.stepped_back:
            return False
        if not self._room.is_open(seq):
            return False
        if seq.request.vocab_size > self._gate.vocab_size(seq.request.adapter_digest):
            self._lives.end_all([seq, *seq.siblings], FinishReason.ERROR, UNKNOWN_TOKEN)
            return False
        return True

    def _chunk_budget(self, num_decodes: int, chunks: list[Sequence]) -> int:
        """How many tokens of prompts a step may have beside its decodes; see `PromptBudget`.

        None of others for a few steps after a tenant has come of which nothing runs.
        """
        if num_decodes and 0 < self._room.num_awaiting <= SHORT_STEPS:
            return 0
        num_open = self._waiting.num_ready(self._gate.staying())
        could_run = min(self._limits.max_num_seqs, len(self._running) + num_open)
        return self._prompt_budget.of_step(
            num_decodes,
            sum(seq.num_missing for seq in chunks) + self._num_admissible_tokens(num_open),
            most_decode=2 * num_decodes >= could_run,
            is_shared=self._lives.is_shared,
        )

    def _num_admissible_tokens(self, num_open: int) -> int:
        """About how many tokens those have who wait, and for whom all is here: adapter, seats, blocks."""
        seats = self._limits.max_num_seqs - self._lives.num_seats
        num_tokens = self._waiting.num_tokens_of(min(seats, num_open))
        return min(num_tokens, self._pool.num_idle * BLOCK_SIZE)

    def _plan_chunk(self, step: _Step, seq: Sequence, *, is_newcomer: bool = False) -> None:
        count = min(seq.num_missing, step.room(is_newcomer=is_newcomer))
        if count > 0:
            step.chunk_budget -= count
            self._plan_row(step, seq, count)

    def _plan_row(self, step: _Step, seq: Sequence, count: int) -> None:
        """Adds the next tokens of a sequence to the step, and charges them."""
        row = make_row(seq, count)
        step.rows.append(row)
        step.budget -= count
        seq.num_computed += count
        if row.sampling is not None and seq.search is None:  # after a beam nothing is drawn
            seq.num_unseen += 1
        if seq.num_charged < seq.num_given:
            paid = min(seq.num_computed, seq.num_given)
            if paid > seq.num_charged:
                self._counters.charge_input(seq.request.tenant, paid - seq.num_charged)
                seq.num_charged = paid
