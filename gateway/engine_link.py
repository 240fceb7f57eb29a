"""The link to one engine: a single gRPC stream that carries all requests of this gateway worker."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Protocol

import grpc

from gateway.tokenizer import Tokenizers
from protos.engine_pb2 import (
    Abort,
    Announce,
    Finished,
    GetModelInfoRequest,
    GetTokenizerRequest,
    LinkRequest,
    LinkResponse,
    ModelInfo,
    Started,
    TokenLogprobs,
)
from protos.engine_pb2_grpc import EngineStub

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 10.0
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    # A machine that vanishes without closing its connections is noticed within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Channels to one address would share their reconnection pauses; ours are in `run`.
    ("grpc.use_local_subchannel_pool", 1),
)


class LinkState(Enum):
    """CONNECTING → READY → LOST → READY …; CLOSED is the end."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    CLOSED = "closed"


class Receiver(Protocol):
    """Who gets what an engine sends about a request. Called on the event loop; must return at once."""

    def on_tokens(self, choice: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """New tokens of a choice, and as many logprobs or none."""
        ...

    def on_prompt_logprobs(self, choice: int, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """What the model thought of the tokens from `start` on of the prompt that a choice belongs to."""
        ...

    def on_searched(self, choice: int, tokens: int) -> None:
        """What more the search that a choice belongs to has cost: its choices are a part of that."""
        ...

    def on_vector(self, choice: int, values: bytes) -> None:
        """The vector of the prompt that a choice belongs to: float32, little-endian."""
        ...

    def on_started(self, choices: Sequence[int], started: Started) -> None:
        """The request has left the engine's queue."""
        ...

    def on_finished(self, choice: int, finished: Finished) -> None:
        """A choice has ended; nothing follows for it."""
        ...

    def on_lost(self, choices: Sequence[int]) -> None:
        """The link broke before these choices ended; they run nowhere now."""
        ...


@dataclass(slots=True)
class _Placement:
    """A request on this link. `choices[i]` is the receiver's number of the wire's choice i."""

    receiver: Receiver
    choices: Sequence[int]
    open: set[int]  # wire's numbers of choices that have not ended


class EngineLink:
    """Keeps one engine's stream open, and hands what comes on it to the requests' receivers.

    `run` owns the connection; `submit`, `announce` and `abort` only queue messages, and may be called while
    `ready`.
    """

    def __init__(
        self, engine_id: str, address: str, tokenizers: Tokenizers, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called after each change of `state`."""
        self.engine_id = engine_id
        self.address = address
        self.state = LinkState.CONNECTING
        self.info: ModelInfo | None = None
        self.stub: EngineStub | None = None
        self._tokenizers = tokenizers
        self._on_change = on_change
        self._outbox: asyncio.Queue[LinkRequest | None] = asyncio.Queue()
        self._placements: dict[int, _Placement] = {}
        self._next_request_id = 1

    @property
    def ready(self) -> bool:
        """Whether requests may be submitted."""
        return self.state is LinkState.READY

    @property
    def in_flight(self) -> int:
        """Choices that run or wait on this link."""
        return sum(len(placement.open) for placement in self._placements.values())

    def submit(self, message: LinkRequest, receiver: Receiver, choices: Sequence[int]) -> int:
        """Sends a message with a Submit, whose seeds belong to the receiver's `choices` in this order.
        Returns the id on this link that it gives it. The message is the link's from now on.
        """
        assert self.ready and len(message.submit.seeds) == len(choices)
        request_id, self._next_request_id = self._next_request_id, self._next_request_id + 1
        message.submit.request_id = request_id
        self._placements[request_id] = _Placement(receiver, choices, set(range(len(choices))))
        self._outbox.put_nowait(message)
        return request_id

    def announce(self, adapter_digest: bytes) -> None:
        """Says that a request for an adapter is about to come."""
        self._outbox.put_nowait(LinkRequest(announce=Announce(adapter_digest=adapter_digest)))

    def abort(self, request_id: int, wire_choice: int | None = None) -> None:
        """Ends one choice of a request, or all. The receiver hears nothing more of it."""
        placement = self._placements.get(request_id)
        if placement is None:
            return
        if wire_choice is not None:
            placement.open.discard(wire_choice)
        if wire_choice is None or not placement.open:
            del self._placements[request_id]
        self._outbox.put_nowait(LinkRequest(abort=Abort(request_id=request_id, choice=wire_choice)))

    async def run(self) -> None:
        """Connects, serves the stream, and connects again when it breaks, until cancelled."""
        backoff_s = _MIN_BACKOFF_S
        try:
            while True:
                try:
                    await self._serve()
                    reason = "the engine closed the stream"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                except Exception as error:
                    # Tokenizer files that cannot be used, or a message against the contract. The link must
                    # outlive whatever an engine sends.
                    reason = f"{type(error).__name__}: {error}"
                    logger.debug("engine %s", self.engine_id, exc_info=True)
                if self.ready:
                    backoff_s = _MIN_BACKOFF_S
                self._lose(reason)
                await asyncio.sleep(backoff_s * random.uniform(0.75, 1.25))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        finally:
            self._drop_placements()
            self._become(LinkState.CLOSED)

    async def _serve(self) -> None:
        """Serves one connection until the engine ends it."""
        async with grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            stub = EngineStub(channel)
            info = await stub.GetModelInfo(GetModelInfoRequest(), timeout=_CALL_TIMEOUT_S)
            await self._tokenizers.load(info.digest, lambda: _fetch_tokenizer(stub))
            self.info, self.stub = info, stub
            self._outbox = outbox = asyncio.Queue()
            stream = stub.Link(self._outgoing(outbox))
            self._become(LinkState.READY)
            try:
                async for message in stream:
                    self._deliver(message)
            finally:
                # gRPC leaves the task that reads `_outgoing` behind when a stream breaks.
                outbox.put_nowait(None)

    @staticmethod
    async def _outgoing(outbox: asyncio.Queue[LinkRequest | None]) -> AsyncIterator[LinkRequest]:
        while (message := await outbox.get()) is not None:
            yield message

    def _deliver(self, message: LinkResponse) -> None:
        """Hands one message's entries to their receivers; those of requests already given up are dropped."""
        placements = self._placements
        for started in message.started:
            if placement := placements.get(started.request_id):
                placement.receiver.on_started(placement.choices, started)
        for prompt in message.prompt_logprobs:
            if placement := placements.get(prompt.request_id):
                placement.receiver.on_prompt_logprobs(placement.choices[0], prompt.start, prompt.tokens)
        for searched in message.searched:
            if placement := placements.get(searched.request_id):
                placement.receiver.on_searched(placement.choices[0], searched.tokens)
        for vector in message.embeddings:
            if placement := placements.get(vector.request_id):
                placement.receiver.on_vector(placement.choices[0], vector.values)
        tokens, logprobs, first = list(message.tokens), message.logprobs, 0
        if len(tokens) != len(message.choices) or len(logprobs) not in (0, len(tokens)):
            raise ValueError("the columns of a message differ in length")
        for (request_id, wire_choice), last in _runs(message):
            placement = placements.get(request_id)
            if placement is not None and wire_choice in placement.open:
                choice = placement.choices[wire_choice]
                placement.receiver.on_tokens(choice, tokens[first:last], logprobs[first:last])
            first = last
        for finished in message.finished:
            placement = placements.get(finished.request_id)
            if placement is None or finished.choice not in placement.open:
                continue
            placement.open.discard(finished.choice)
            if not placement.open:
                del placements[finished.request_id]
            placement.receiver.on_finished(placement.choices[finished.choice], finished)

    def _lose(self, reason: str) -> None:
        """Says once that the engine is gone, and tells the receivers of what ran there."""
        in_flight = self.in_flight
        if self.state is LinkState.READY:
            logger.warning(
                "lost engine %s at %s (%s); %d sequences in flight go on elsewhere",
                self.engine_id, self.address, reason, in_flight,
            )  # fmt: skip
        elif self.state is LinkState.CONNECTING:
            logger.warning(
                "cannot reach engine %s at %s (%s); trying again", self.engine_id, self.address, reason
            )
        self.stub = None
        self._become(LinkState.LOST)
        self._drop_placements()

    def _drop_placements(self) -> None:
        placements, self._placements = self._placements, {}
        for placement in placements.values():
            placement.receiver.on_lost([placement.choices[wire] for wire in sorted(placement.open)])

    def _become(self, state: LinkState) -> None:
        """The only place where `state` changes."""
        if state is LinkState.READY:
            logger.info("linked to engine %s at %s", self.engine_id, self.address)
        changed, self.state = self.state is not state, state
        if changed:
            self._on_change()


def _runs(message: LinkResponse) -> Iterator[tuple[tuple[int, int], int]]:
    """Yields whose each run of tokens is, by request and choice, and where it ends."""
    last = 0
    for whose, entries in groupby(zip(message.request_ids, message.choices, strict=True)):
        last += len(list(entries))
        yield whose, last


async def _fetch_tokenizer(stub: EngineStub) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    async for chunk in stub.GetTokenizer(GetTokenizerRequest(), timeout=_CALL_TIMEOUT_S):
        files[chunk.name] = files.get(chunk.name, b"") + chunk.data
    return files
