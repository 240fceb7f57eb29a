"""Requests, and the sequences that they are made of."""

from __future__ import annotations

import enum
import logging
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.beams import BeamOptions
from engine.block_pool import BLOCK_SIZE, activation_hash, block_hashes
from engine.constraints import Constraint, Grammar
from engine.step import Pooling, SamplingParams, StepAdapter

if TYPE_CHECKING:
    import numpy as np

    from engine.scheduler.beam_group import BeamGroup

logger = logging.getLogger(__name__)


class FinishReason(enum.IntEnum):
    """Why a sequence ended; the numbers are the wire's."""

    STOP = 1
    LENGTH = 2
    ABORTED = 3
    DEADLINE = 4
    ERROR = 5
    REFUSED = 6


class Failure(enum.IntEnum):
    """What has failed of a sequence that ended with an error; the numbers are the wire's."""

    UNSPECIFIED = 0
    STORE_UNAVAILABLE = 1


class Refusal(enum.IntEnum):
    """What stands in the way of a request that was refused; the numbers are the wire's."""

    UNSPECIFIED = 0
    DRAINING = 1
    QUEUE_FULL = 2
    TENANT_QUEUE_FULL = 3


class Status(enum.Enum):
    """Where a sequence is in its life::

        WAITING ──admit──▶ RUNNING ──▶ FINISHED        any state may go to FINISHED
           ▲                 │  ▲
           └────preempt──────┘  └──fork── ATTACHED

    An attached sequence is a further choice of a request whose first choice is computing their prompt, or a
    further beam of a search: those are attached again when the search has to wait.
    """

    WAITING = "waiting"
    ATTACHED = "attached"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked for: one prompt, and one sequence for each choice. Immutable after submission.

    Attributes:
        link: whom the outputs go to; together with ``request_id`` it names the request.
        output: tokens that were already generated elsewhere; decoding goes on after them.
        adapter_digest: empty for the base model.
        vocab_size: of the least vocabulary with all of the request's tokens; 0: the base model's is enough.
        adapter_start: the first position that the adapter applies to; the base model computes those before.
        block_root: parent of the first block's hash (`engine.block_pool.root_hash`): the base model's, unless
            the adapter applies from the first token on.
        sampling: for each choice, with its own seed.
        max_len: most tokens in a sequence, prompt included.
        stop_token_ids: tokens that end a sequence, the model's own end tokens among them if they count.
        grammar: what each choice's output must fit; None: anything.
        prompt_logprobs: alternatives for each token of the prompt, if its tokens' logprobs are wanted.
        prompt_only: only the prompt is wanted: what is drawn after it is told nobody.
        pooling: set: the vector of the prompt is wanted, and nothing else (``prompt_only``).
        beams: set: the choices are not drawn, but searched for; they are told when the search has ended.
        arrival, deadline: seconds on the scheduler's clock.
    """

    link: Hashable
    request_id: int
    prompt: Seq[int]
    sampling: tuple[SamplingParams, ...]
    max_len: int
    block_root: bytes
    output: Seq[int] = ()
    adapter_digest: bytes = b""
    adapter_start: int = 0
    vocab_size: int = 0
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    pooling: Pooling | None = None
    beams: BeamOptions | None = None
    arrival: float = 0.0
    deadline: float | None = None
    prompt_hashes: list[bytes] = field(init=False)
    banned_before_min: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        known = [*self.prompt, *self.output]
        border = self.adapter_start // BLOCK_SIZE * BLOCK_SIZE
        self.prompt_hashes = block_hashes(self.block_root, known[:border])
        parent = self.parent_hash(self.prompt_hashes)
        self.prompt_hashes += block_hashes(parent, known[border:])
        self.banned_before_min = tuple(sorted(self.stop_token_ids))

    @property
    def key(self) -> tuple[Hashable, int]:
        return self.link, self.request_id

    @property
    def most_blocks(self) -> int:
        """Blocks that it holds at most. Beams share the prompt's full ones."""
        most = -(-self.max_len // BLOCK_SIZE)
        shared = len(self.prompt) // BLOCK_SIZE
        return most if self.beams is None else shared + self.beams.width * (most - shared)

    def parent_hash(self, hashes: Seq[bytes]) -> bytes:
        """What the next block's hash follows, when ``hashes`` are those of all blocks before it."""
        parent = hashes[-1] if hashes else self.block_root
        if self.adapter_start and len(hashes) == self.adapter_start // BLOCK_SIZE:
            return activation_hash(parent, self.adapter_digest, self.adapter_start % BLOCK_SIZE)
        return parent


class Sequence:
    """One stream of tokens. All fields are written by the scheduler alone, on the loop's thread.

    Attributes:
        tokens: prompt and output; grows only, but for a beam's.
        block_ids: the block table; empty unless running. Replaced, never cleared, when it is given back, so
            that a plan that holds it stays as it was.
        block_hashes: of the full blocks of ``tokens`` that are known so far.
        num_computed: tokens whose KV is written once the step scheduled last has run.
        num_unseen: tokens drawn by steps that are under way, and thus not in ``tokens`` yet.
        num_published: blocks of the table that the prefix map knows, or could.
        num_given: tokens that came with the request.
        num_at_start: how many there were when it was admitted last, or its search last spread.
        num_charged: of these, how many the tenant has paid for, or got from the cache.
        num_scored: of the prompt's tokens, those whose logprobs have been told; the first has none.
        siblings: attached sequences that start from this one's prompt.
        search: that it is a beam of; None: it draws tokens.
        vector: of the prompt, as far as it is computed: a sum, where its pooling is the mean.
        constraint: where its output stands in the request's grammar; None without one.
        order: place among the waiting of a tenant; lower is sooner.
    """

    __slots__ = (
        "adapter",
        "block_hashes",
        "block_ids",
        "choice",
        "constraint",
        "num_at_start",
        "num_charged",
        "num_computed",
        "num_given",
        "num_prompt",
        "num_published",
        "num_scored",
        "num_unseen",
        "order",
        "params",
        "request",
        "search",
        "seq_id",
        "siblings",
        "status",
        "tokens",
        "vector",
    )

    def __init__(self, request: Request, choice: int, seq_id: int) -> None:
        self.request = request
        self.choice = choice
        self.seq_id = seq_id
        self.params = request.sampling[choice]
        self.tokens: list[int] = [*request.prompt, *request.output]
        self.num_prompt = len(request.prompt)
        self.num_given = len(self.tokens)
        self.block_ids: list[int] = []
        self.block_hashes = list(request.prompt_hashes)
        self.num_computed = 0
        self.num_unseen = 0
        self.num_at_start = 0
        self.num_published = 0
        self.num_charged = 0
        self.num_scored = 1
        self.adapter: StepAdapter | None = None
        grammar = request.grammar
        self.constraint: Constraint | None = grammar.start(request.output) if grammar is not None else None
        self.vector: np.ndarray | None = None
        self.siblings: list[Sequence] = []
        self.search: BeamGroup | None = None
        self.order: tuple[int, int, int] = (1, request.priority, seq_id)
        self.status = Status.WAITING

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens that are not computed yet; 1 in decode."""
        return len(self.tokens) + self.num_unseen - self.num_computed

    @property
    def is_ending(self) -> bool:
        """Whether a step under way draws the last token that there is room for."""
        return len(self.tokens) + self.num_unseen >= self.request.max_len

    @property
    def unit(self) -> Seq[Sequence]:
        """Those that stop running when it does: all beams of a search, the first choice first."""
        return (self,) if self.search is None else self.search.running or (self,)

    @property
    def leads(self) -> bool:
        """Whether it stands for its unit."""
        return self.search is None or self.choice == 0

    @property
    def num_seats(self) -> int:
        """Seats that its unit takes, or will, with those that start from its prompt."""
        return len(self.unit) + len(self.siblings)

    @property
    def num_blocks(self) -> int:
        """Blocks that its unit holds; those that its beams share count once."""
        unit = self.unit
        return len(self.block_ids) if len(unit) == 1 else len({id for seq in unit for id in seq.block_ids})

    def set_status(self, status: Status, why: str = "") -> None:
        """The only place where a life moves on."""
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s choice %d: %s -> %s %s",
                self.request.request_id,
                self.choice,
                self.status.value,
                status.value,
                why,
            )
        self.status = status

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.status.value}, {self.num_computed}/{len(self.tokens)} tokens)"
