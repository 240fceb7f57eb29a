"""All engines that live, as this gateway worker sees them:
leases in Redis say who, a link to each says how it fares.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
from redis.exceptions import RedisError

from adapters.leases import EngineLease, EngineLeases
from gateway import engine_sizes, routing, tasks
from gateway.beam_stream import BeamStream
from gateway.engine_link import EngineLink
from gateway.engine_stream import EngineStream
from gateway.tokenizer import Tokenizers
from protos.engine_pb2 import (
    AdapterState,
    ListAdaptersRequest,
    ModelInfo,
    Residency,
    Submit,
    UnloadAdapterRequest,
)
from protos.engine_pb2_grpc import EngineStub

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_POLL_TIMEOUT_S = 2.0
_ADAPTER_CALL_TIMEOUT_S = 10.0
_ADAPTER_STATE_TIMEOUT_S = 1.0
_IN_MEMORY = ("device", "host")
_HELD = (Residency.RESIDENCY_DEVICE, Residency.RESIDENCY_HOST)


class EngineFleet:
    """Follows the engines' leases and keeps a link to each. What it knows outlives a Redis that is away."""

    def __init__(self, leases: EngineLeases, tokenizers: Tokenizers, *, resume_timeout_s: float) -> None:
        """`resume_timeout_s`: how long a request whose engine was lost waits for another."""
        self._leases = leases
        self._tokenizers = tokenizers
        self._resume_timeout_s = resume_timeout_s
        self._lease_of: dict[str, EngineLease] = {}
        self._links: dict[str, EngineLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._models: dict[str, ModelInfo] = {}
        self._sizes_differ = False
        self._looked_for: set[tuple[bytes, bytes]] = set()  # adapters and models, since the last leases
        self._change = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._redis_away = False

    async def start(self) -> None:
        """Begins to follow the leases, in a task of its own. Returns at once."""
        self._follower = tasks.start(self._follow(), "engine-leases")

    async def close(self) -> None:
        """Ends all links; engines abort what ran on them."""
        if self._follower:
            await tasks.cancel(self._follower, *self._tasks.values())

    def model_info(self, name: str | None = None) -> ModelInfo | None:
        """Returns the model of this name, or the first of `models`; None when there is none.

        Its sizes are what requests and uploads are checked against; see `gateway.engine_sizes`.
        """
        return next(iter(self._models.values()), None) if name is None else self._models.get(name)

    def models(self) -> list[ModelInfo]:
        """Returns the models of the linked engines; they stay known until engines of others come."""
        return list(self._models.values())

    def ready_engines(self) -> int:
        """Returns how many engines can take requests."""
        return sum(link.ready for link in self._links.values())

    def residency(self, digest_hex: str) -> dict[str, str]:
        """Returns by engine id where the adapter is held, for engines that hold it."""
        return {
            engine_id: lease.residency[digest_hex]
            for engine_id, lease in self._lease_of.items()
            if digest_hex in lease.residency
        }

    def leases(self) -> list[EngineLease]:
        """Returns the leases of the engines that live, as old as the last look."""
        return list(self._lease_of.values())

    async def adapter_states(self, digest: bytes) -> dict[str, dict[str, Any]]:
        """Returns by engine id where an adapter is and what it has been through there.

        Left out are engines that have never held it, and those that do not answer in time.
        """

        async def ask(stub: EngineStub) -> AdapterState | None:
            try:
                answer = await stub.ListAdapters(
                    ListAdaptersRequest(digest=digest), timeout=_ADAPTER_STATE_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as error:
                logger.warning("an engine does not say where an adapter is: %s", error.details())
                return None
            return next(iter(answer.adapters), None)

        links = {link.engine_id: link.stub for link in self._links.values() if link.stub is not None}
        states = await asyncio.gather(*(ask(stub) for stub in links.values()))
        found = zip(links, states, strict=True)
        return {
            engine_id: {
                "tier": Residency.Name(state.residency).removeprefix("RESIDENCY_").lower(),
                "pinned": state.pinned,
                "hits": state.hits,
                "requests": {
                    "device": state.hits_device,
                    "host": state.hits - state.hits_device,
                    "none": state.misses,
                },
                "loads": state.loads,
                "load_seconds": round(state.load_seconds, 4),
                "evictions": state.evictions,
            }
            for engine_id, state in found
            if state is not None and (state.loads or state.residency in _HELD)
        }

    def announce(self, digest: bytes, model_digest: bytes) -> None:
        """Has the engine that a request for this adapter will probably go to begin to read it.

        Call it when the request comes, before its tokens are made. Does nothing when the adapter is in the
        engine's memory, when there is no engine, or when it was called for this adapter just before.
        """
        if (digest, model_digest) in self._looked_for:
            return
        link = self.choose(Submit(adapter_digest=digest), model_digest, set())
        if link is not None:
            self._looked_for.add((digest, model_digest))
            if not self._candidate(link, digest.hex()).resident:
                link.announce(digest)

    def open(self, submits: Sequence[Submit], *, model_digest: bytes, deadline: float) -> EngineStream:
        """Returns the stream of a request of one or more prompts; the caller must close it.

        `deadline`: when it must have ended, by `time.monotonic`.
        """
        kind = BeamStream if submits[0].HasField("beams") else EngineStream
        return kind(
            submits,
            model_digest=model_digest,
            placer=self,
            resume_timeout_s=self._resume_timeout_s,
            deadline=deadline,
        )

    async def unload(self, digest: bytes) -> None:
        """Asks every engine to forget an adapter. An engine that cannot is only logged."""

        async def ask(link: EngineLink, stub: EngineStub) -> None:
            try:
                await stub.UnloadAdapter(UnloadAdapterRequest(digest=digest), timeout=_ADAPTER_CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                logger.warning("engine %s: %s", link.engine_id, error.details())

        links = list(self._links.values())
        await asyncio.gather(*(ask(link, stub) for link in links if (stub := link.stub) is not None))

    # ---- placing --------------------------------------------------------------------------------------

    def choose(self, submit: Submit, model_digest: bytes, excluded: set[str]) -> EngineLink | None:
        """See Placer. Engines that drain, or whose lease is gone, take nothing new while others can."""
        ready = [
            link
            for engine_id, link in self._links.items()
            if link.ready and link.info and link.info.digest == model_digest and engine_id not in excluded
            if not self._sizes_differ or engine_sizes.is_large_enough(link.info, submit)
        ]
        leased = [
            link for link in ready if (lease := self._lease_of.get(link.engine_id)) and not lease.draining
        ]
        links = leased or [link for link in ready if link.engine_id not in self._lease_of]
        if len(links) < 2:
            return links[0] if links else None
        # What comes before an activated adapter is the base model's, for all such adapters alike: to find it
        # computed saves more than to find the adapter in memory.
        adapter = b"" if submit.adapter_start else submit.adapter_digest
        candidates = [self._candidate(link, adapter.hex()) for link in links]
        key = routing.affinity_key(adapter, submit.cache_scope, submit.prompt_tokens)
        return self._links[routing.choose(key, candidates)]

    def _candidate(self, link: EngineLink, digest_hex: str) -> routing.Candidate:
        lease = self._lease_of.get(link.engine_id)
        if lease is None:
            return routing.Candidate(link.engine_id, link.in_flight)
        # The lease counts everybody's requests, but is up to a second old; ours are known at once.
        load = max(lease.running + lease.waiting, link.in_flight)
        return routing.Candidate(link.engine_id, load, lease.residency.get(digest_hex) in _IN_MEMORY)

    async def changed(self, timeout_s: float) -> None:
        """See Placer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change.wait()

    def _on_link_change(self) -> None:
        infos = [link.info for link in self._links.values() if link.info]
        ready = [link.info for link in self._links.values() if link.info and link.ready]
        # Where two models have one name, since one replaces the other, it is that of an engine that is here.
        digests = {info.name: info.digest for info in (*infos, *ready)}
        models = {
            name: engine_sizes.info_for_all(
                [info for info in infos if info.name == name and info.digest == digest]
            )
            for name, digest in digests.items()
        }
        self._models = models or self._models
        self._sizes_differ = engine_sizes.differ(infos)
        self._change.set()
        self._change = asyncio.Event()

    # ---- following the leases -------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_POLL_TIMEOUT_S):
                    leases = await self._leases.live()
            except (RedisError, OSError, TimeoutError) as error:
                if not self._redis_away:
                    logger.warning(
                        "Redis is away (%s); keeping the engines known so far", type(error).__name__
                    )
                self._redis_away = True
            else:
                if self._redis_away:
                    logger.info("Redis is back")
                self._redis_away = False
                await self._update({lease.engine_id: lease for lease in leases})
            await asyncio.sleep(_POLL_S)

    async def _update(self, leases: dict[str, EngineLease]) -> None:
        """Opens links to engines that are new or moved, and
        ends those whose lease is gone and which are down.
        """
        self._lease_of = leases
        self._looked_for.clear()
        for engine_id, link in list(self._links.items()):
            lease = leases.get(engine_id)
            if (lease is None and not link.ready) or (lease is not None and lease.address != link.address):
                await self._end_link(engine_id)
        for engine_id, lease in leases.items():
            if engine_id not in self._links:
                link = EngineLink(engine_id, lease.address, self._tokenizers, self._on_link_change)
                self._links[engine_id] = link
                self._tasks[engine_id] = tasks.start(link.run(), f"link-{engine_id}")

    async def _end_link(self, engine_id: str) -> None:
        del self._links[engine_id]
        await tasks.cancel(self._tasks.pop(engine_id))
