"""Every change of a sequence's state, and of what it holds meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from engine.block_pool import BLOCK_SIZE
from engine.outputs import Outputs
from engine.scheduler.adapter_gate import AdapterGate
from engine.scheduler.beam_group import BeamGroup
from engine.scheduler.block_tables import BlockTables
from engine.scheduler.fairness import VirtualTokenCounters
from engine.scheduler.queue_bounds import QueueBounds
from engine.scheduler.roster import Roster
from engine.scheduler.waiting import WaitingQueue
from engine.sequence import Failure, FinishReason, Request, Sequence, Status
from engine.step import Pooling, RowResult, TokenLogprobs

VECTOR_NOT_FINITE = "the model's output for this prompt is not finite"
BACK_SECONDS = 10.0
"""For how long a tenant that has gone is reckoned among those who are here."""


class Lives:
    """The sequences that are here, each where its status says. The scheduler decides; this carries it out.

    Attributes:
        running: those that hold blocks, in the order of their admission.
        waiting: those that may be admitted.
        roster: all of them.
        outputs: the news of what happens here.
        tables: the block tables.
        counters: who was served how much.
        num_yielded_blocks: what those hold in the prefix cache at most who ran, and wait again.
        stepped_back: ids of those that ran, and wait again, since the step's planning began.
    """

    def __init__(
        self,
        tables: BlockTables,
        gate: AdapterGate,
        counters: VirtualTokenCounters,
        bounds: QueueBounds,
        clock: Callable[[], float],
    ) -> None:
        self.num_preemptions = 0
        self.num_yields = 0
        self.num_yielded_blocks = 0
        self._yielded_blocks: dict[int, int] = {}
        self.stepped_back: set[int] = set()
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(counters)
        self.roster = Roster()
        self.outputs = Outputs()
        self.tables = tables
        self._gate = gate
        self.counters = counters
        self._bounds = bounds
        self._clock = clock
        self._left_last = ("", -math.inf)  # the last tenant of which nothing was left, and when

    @property
    def num_seats(self) -> int:
        """Running sequences, and those that will run without another admission."""
        return sum(1 + len(seq.siblings) for seq in self.running)

    @property
    def is_shared(self) -> bool:
        """Whether there are several tenants; one that was here a while ago is reckoned to come again."""
        tenants = self.roster.tenants()
        tenant, left_at = self._left_last
        is_back_soon = tenant not in tenants and self._clock() - left_at < BACK_SECONDS
        return len(tenants) + is_back_soon > 1

    def check(self) -> None:
        """Asserts that everyone is in the one place that its status says."""
        waiting = list(self.waiting)
        attached = [sibling for seq in (*self.running, *waiting) for sibling in seq.siblings]
        everyone = [*self.running, *waiting, *attached]
        assert sorted(s.seq_id for s in everyone) == sorted(s.seq_id for s in self.roster), "one is lost"
        assert all(seq.status is Status.RUNNING for seq in self.running)
        assert all(seq.status is Status.WAITING for seq in waiting)
        assert all(seq.status is Status.ATTACHED for seq in attached)
        assert self._yielded_blocks.keys() == {seq.seq_id for seq in waiting if seq.num_at_start}
        assert self.num_yielded_blocks == sum(self._yielded_blocks.values())
        assert not any(seq.block_ids or seq.adapter for seq in (*waiting, *attached)), "holds while waiting"
        self.counters.check([seq.request.tenant for seq in self.running])

    def begin_step(self) -> None:
        """The planning of a step begins."""
        self.stepped_back.clear()

    # ---- the good way --------------------------------------------------------------------------------

    def queue(self, request: Request) -> None:
        """Takes in a request: its first choice waits, the others are attached to it."""
        sequences = leader, *siblings = self.roster.enlist(request)
        for sibling in siblings:
            sibling.set_status(Status.ATTACHED)
        leader.siblings = siblings
        if request.beams is not None:
            group = BeamGroup(request, sequences)
            for seq in sequences:
                seq.search = group
        self.waiting.push(leader)
        if len(leader.tokens) >= request.max_len:
            self.end_all([leader, *siblings], FinishReason.LENGTH)
        else:
            self._gate.want(request.adapter_digest, request.tenant)

    def start(self, seq: Sequence) -> None:
        """Makes a waiting sequence that has its blocks run."""
        self._wait_no_more(seq)
        seq.adapter = self._gate.acquire(seq.request.adapter_digest)
        seq.num_charged = max(seq.num_charged, min(seq.num_computed, seq.num_given))
        seq.num_at_start = len(seq.tokens) + seq.num_unseen
        self._run(seq, len(self.running))
        if self.roster.mark_started(seq.request):
            queue_us = max(0, int((self._clock() - seq.request.arrival) * 1e6))
            cached = min(seq.num_computed, seq.num_prompt)
            self.outputs.started(seq.request, cached_tokens=cached, queue_us=queue_us)
            self._bounds.note_start(seq.request.tenant, len(seq.request.sampling))

    def take_prompt_logprobs(self, seq: Sequence, start: int, found: tuple[TokenLogprobs, ...]) -> None:
        """Tells the logprobs of a prompt's tokens from ``start`` on, but for those told before."""
        assert start <= seq.num_scored, "some in between are missing"
        new = found[seq.num_scored - start :]
        if new:
            self.outputs.prompt_logprobs(seq.request, seq.num_scored, new)
            seq.num_scored += len(new)

    def take_vector(self, seq: Sequence, start: int, part: np.ndarray) -> None:
        """Adds what the prompt's tokens from ``start`` on say to its vector; from 0 on, that begins anew."""
        is_sum = seq.request.pooling is Pooling.MEAN and start > 0
        seq.vector = seq.vector + part if is_sum and seq.vector is not None else part

    def take_token(self, seq: Sequence, outcome: RowResult) -> None:
        """Appends a token to a sequence, and ends it if that was the last."""
        assert outcome.seq_id == seq.seq_id, "results are not in the plan's order"
        if seq.siblings and seq.status is Status.RUNNING:
            self._fork_siblings(seq)
        request, token = seq.request, outcome.token
        if request.pooling is not None:
            self._tell_vector(seq)
            return
        if request.prompt_only:
            self.end(seq, FinishReason.LENGTH)
            return
        seq.tokens.append(token)
        self.outputs.token(seq, token, outcome.logprobs)
        self.counters.charge_output(request.tenant)
        if seq.constraint is not None:
            seq.constraint.take(token)
        if token in request.stop_token_ids or (seq.constraint is not None and seq.constraint.is_complete):
            self.end(seq, FinishReason.STOP)
        elif len(seq.tokens) >= request.max_len:
            self.end(seq, FinishReason.LENGTH)

    def _tell_vector(self, seq: Sequence) -> None:
        """Ends a sequence whose vector is complete."""
        assert seq.vector is not None, "it comes no later than the draw after its last token"
        is_mean = seq.request.pooling is Pooling.MEAN
        vector = seq.vector / len(seq.request.prompt) if is_mean else seq.vector
        if not np.isfinite(vector).all():
            self.end_spoiled(seq, VECTOR_NOT_FINITE)
            return
        self.outputs.vector(seq.request, vector.astype("<f4").tobytes())
        self.end(seq, FinishReason.STOP)

    def _fork_siblings(self, leader: Sequence) -> None:
        """Lets the further choices run from the prompt that the leader has computed."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            self.tables.fork(leader, sibling)
            self._run_forked(sibling, len(self.running))

    def fork_beams(self, leader: Sequence) -> None:
        """Lets the other beams run from all that the leader has computed, right behind it."""
        siblings, leader.siblings = leader.siblings, []
        for place, sibling in enumerate(siblings, self.running.index(leader) + 1):
            self.tables.branch(leader, sibling)
            self._run_forked(sibling, place)

    def _run_forked(self, seq: Sequence, place: int) -> None:
        seq.adapter = self._gate.acquire(seq.request.adapter_digest)
        seq.num_charged = seq.num_given
        seq.num_scored = seq.num_prompt
        seq.num_at_start = len(seq.tokens)
        self._run(seq, place, "forked")

    def _run(self, seq: Sequence, place: int, why: str = "") -> None:
        seq.set_status(Status.RUNNING, why)
        self.running.insert(place, seq)
        self.counters.start(seq.request.tenant)

    # ---- back to the queue ---------------------------------------------------------------------------

    def preempt(self, seq: Sequence) -> None:
        """Takes everything from a running sequence and puts it to the front of its tenant; from all beams of
        a search, where it is one.
        """
        self.num_preemptions += 1
        self._wait_again(self._step_back(seq), "preempted")

    def yield_room(self, seq: Sequence) -> None:
        """As `preempt`, for a tenant of which nothing runs."""
        self.num_yields += 1
        self._wait_again(self._step_back(seq), "makes room")

    def yield_pages(self, seq: Sequence, claimant: str) -> None:
        """Takes everything from a running sequence, whose adapter makes room for one of a tenant.

        For its own tenant it goes behind those that wait, whose turn it is then. Another tenant's claim does
        not change the order within its own: it goes to the front.
        """
        own = seq.request.tenant == claimant
        first = self._step_back(seq)
        order = (1, seq.request.priority, self.roster.take_ticket()) if own else None
        self._wait_again(first, "yields", order=order)

    def _step_back(self, seq: Sequence) -> Sequence:
        """Takes everything from a running sequence and those that come and go with it. Returns the first of
        them, which is to wait for all.
        """
        first, *others = seq.unit
        for each in (first, *others):
            self._stop_running(each)
        for other in others:
            other.set_status(Status.ATTACHED, "its search waits")
        if first.search is not None:
            first.search.gather()
        return first

    def _wait_again(self, seq: Sequence, why: str, *, order: tuple[int, int, int] | None = None) -> None:
        """Queues a sequence once more: at the front of its tenant's, unless the order says where."""
        self.stepped_back.add(seq.seq_id)
        seq.order = order or (0, seq.request.priority, seq.seq_id)
        seq.set_status(Status.WAITING, why)
        self.waiting.push(seq)
        if seq.num_at_start:
            blocks = self._yielded_blocks[seq.seq_id] = len(seq.tokens) // BLOCK_SIZE
            self.num_yielded_blocks += blocks

    def _wait_no_more(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.num_yielded_blocks -= self._yielded_blocks.pop(seq.seq_id, 0)

    def _stop_running(self, seq: Sequence, *, spoiled: bool = False) -> None:
        """The only way out of the running list: blocks and the adapter's reference are given back."""
        self.running.remove(seq)
        self.counters.stop(seq.request.tenant)
        self.tables.release(seq, spoiled=spoiled)
        if seq.adapter is not None:
            self._gate.release(seq.request.adapter_digest)
            seq.adapter = None

    # ---- the end -------------------------------------------------------------------------------------

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        error: str = "",
        *,
        failure: Failure = Failure.UNSPECIFIED,
        spoiled: bool = False,
    ) -> None:
        """The only way out of the engine, from whatever state. The first of the siblings takes over."""
        if seq.status is Status.RUNNING:
            self._stop_running(seq, spoiled=spoiled)
        elif seq.status is Status.WAITING:
            self._wait_no_more(seq)
            if spoiled:  # preempted while the step that spoiled it was under way
                self.tables.forget(seq)
        else:
            self._detach(seq)
        seq.set_status(Status.FINISHED, reason.name)
        seq.search = None  # the sequences of a search would be a cycle, for the collector to find
        self.roster.strike(seq)
        if not self.roster.num_of_tenant(seq.request.tenant):
            self._left_last = (seq.request.tenant, self._clock())
        self.outputs.finished(seq.request, seq.choice, reason, error, failure)
        if seq.siblings:
            heir, *others = seq.siblings
            seq.siblings = []
            heir.siblings = others
            heir.num_charged = seq.num_charged
            heir.num_scored = seq.num_scored
            self._wait_again(heir, "leads now")

    def end_all(
        self,
        sequences: Iterable[Sequence],
        reason: FinishReason,
        error: str = "",
        failure: Failure = Failure.UNSPECIFIED,
    ) -> None:
        """Ends several sequences, attached ones first, so that none takes over from another in vain."""
        for seq in sorted(sequences, key=lambda seq: seq.status is not Status.ATTACHED):
            self.end(seq, reason, error, failure=failure)

    def end_spoiled(self, seq: Sequence, why: str) -> None:
        """Ends a sequence whose results cannot be trusted, those that would start from them, and those that
        come and go with it.
        """
        first, *others = [seq, *seq.siblings] if seq.search is None else seq.search.seats
        for each in (*others, first):
            self.end(each, FinishReason.ERROR, why, spoiled=True)

    def end_failed_adapters(self) -> None:
        """Ends the waiting sequences whose adapter could not be brought; attached ones with their leader."""
        for failed in self._gate.take_failures():
            failure = Failure.STORE_UNAVAILABLE if failed.may_be_read_later else Failure.UNSPECIFIED
            for leader in self.waiting.of_adapter(failed.digest):
                self.end_all([leader, *leader.siblings], FinishReason.ERROR, failed.reason, failure)

    def _detach(self, seq: Sequence) -> None:
        for other in self.roster.of_request(*seq.request.key):
            if seq in other.siblings:
                other.siblings.remove(seq)
