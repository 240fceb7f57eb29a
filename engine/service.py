"""What the engine answers over gRPC: `protos/engine.proto`.

All of it runs on the server's event loop. What goes to the engine's loop and back crosses `EngineLoop`'s
queue and one callback per step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
from grpc.aio import ServicerContext

from engine.adapter_status import AdapterStatus, Residency
from engine.constraints import Grammars
from engine.intake import Intake
from engine.link import Link
from engine.loop import EngineLoop, LoopStatus
from engine.outputs import LinkOutput
from engine.submission import DIGEST_BYTES
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

FILE_CHUNK_BYTES = 1 << 20
DRAIN_POLL_SECONDS = 0.02
NUM_LOOK_UPS = 8
"""Look-ups in the store at once, each in a thread. They may hang, so nothing else waits for these threads."""


class EngineService(pb_grpc.EngineServicer):
    """Answers the calls of gateways.

    Args:
        model: what `GetModelInfo` says, and what submissions are checked against.
        tokenizer_files: what `GetTokenizer` sends, by name.
        on_disk: whether the store has an adapter that is in no memory; called in a thread. Raises OSError
            where the store cannot be read.
        grammars: None where answers cannot be held to a grammar.
    """

    def __init__(
        self,
        loop: EngineLoop,
        model: pb.ModelInfo,
        tokenizer_files: Mapping[str, bytes],
        on_disk: Callable[[bytes], bool],
        grammars: Grammars | None = None,
    ) -> None:
        self._loop = loop
        self._intake = Intake(loop, model, grammars)
        self._model = model
        self._tokenizer_files = tokenizer_files
        self._on_disk = on_disk
        self._look_ups = ThreadPoolExecutor(NUM_LOOK_UPS, thread_name_prefix="store-look-up")
        self._links: set[Link] = set()
        self.is_draining = False

    def take_news(self, news: Mapping[Hashable, LinkOutput]) -> None:
        """Hands the news of a step to the links; on the event loop. News for links that are gone is lost."""
        for link, output in news.items():
            if link in self._links and isinstance(link, Link):
                link.put(output)

    async def Link(
        self, request_iterator: AsyncIterator[pb.LinkRequest], context: ServicerContext
    ) -> AsyncIterator[pb.LinkResponse]:
        link = Link()
        self._links.add(link)
        reader = asyncio.create_task(self._read(link, request_iterator))
        # Asked now: at the end the call may be gone already, and gRPC would read freed memory.
        peer = context.peer()
        logger.info("a link from %s", peer)
        try:
            while messages := await link.messages():
                for message in messages:
                    yield message
            if link.fault:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, link.fault)
        finally:
            reader.cancel()
            self._links.discard(link)
            self._intake.close(link)
            logger.info("the link from %s has ended", peer)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: ServicerContext) -> pb.ModelInfo:
        return self._model

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: ServicerContext
    ) -> AsyncIterator[pb.FileChunk]:
        for name, data in self._tokenizer_files.items():
            for start in range(0, max(1, len(data)), FILE_CHUNK_BYTES):
                yield pb.FileChunk(name=name, data=data[start : start + FILE_CHUNK_BYTES])

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: ServicerContext) -> pb.AdapterState:
        await self._check_digest(request.digest, context)
        try:
            is_there = await self._is_on_disk(request.digest)
        except OSError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the store cannot be read: {error}")
        if not is_there:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the store has no adapter with this digest")
        fault = await asyncio.wrap_future(self._loop.prefetch(request.digest))
        if fault:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, fault)
        return await self._adapter_state(request.digest)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: ServicerContext
    ) -> pb.AdapterState:
        await self._check_digest(request.digest, context)
        self._loop.unload(request.digest)
        return await self._adapter_state(request.digest)

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: ServicerContext
    ) -> pb.ListAdaptersResponse:
        if request.digest:
            await self._check_digest(request.digest, context)
            return pb.ListAdaptersResponse(adapters=[await self._adapter_state(request.digest)])
        adapters = await asyncio.wrap_future(self._loop.adapters())
        return pb.ListAdaptersResponse(adapters=[_to_state(adapter) for adapter in adapters])

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.DrainResponse:
        return pb.DrainResponse(remaining=await self.drain(request.timeout_ms / 1000))

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests, waits for the last to end, and returns how many had not at the deadline."""
        self.is_draining = True
        self._loop.drain()
        deadline = time.monotonic() + timeout_s
        while True:
            status = await self.status()
            remaining = status.running + status.waiting
            if not remaining or time.monotonic() >= deadline:
                return remaining
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def status(self) -> LoopStatus:
        """A look at the engine's loop between two steps."""
        return await asyncio.wrap_future(self._loop.status())

    async def _read(self, link: Link, requests: AsyncIterator[pb.LinkRequest]) -> None:
        """Takes in a link's messages until it ends or breaks the rules."""
        fault: str | None = None
        try:
            async for message in requests:
                if message.HasField("submit"):
                    fault = self._intake.submit(link, message.submit)
                elif message.HasField("abort"):
                    self._intake.abort(link, message.abort)
                elif message.HasField("announce"):
                    self._loop.expect(message.announce.adapter_digest)
                if fault:
                    break
        finally:
            link.end(fault)

    async def _adapter_state(self, digest: bytes) -> pb.AdapterState:
        adapter = await asyncio.wrap_future(self._loop.adapter(digest))
        if adapter.residency is Residency.NONE:
            # It is nowhere for now where the store is away, and its load says why.
            with contextlib.suppress(OSError):
                if await self._is_on_disk(digest):
                    adapter = replace(adapter, residency=Residency.DISK)
        return _to_state(adapter)

    async def _is_on_disk(self, digest: bytes) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._look_ups, self._on_disk, digest)

    async def _check_digest(self, digest: bytes, context: ServicerContext) -> None:
        if len(digest) != DIGEST_BYTES:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}"
            )


def _to_state(adapter: AdapterStatus) -> pb.AdapterState:
    return pb.AdapterState(
        digest=adapter.digest,
        residency=f"RESIDENCY_{adapter.residency.name}",
        rank=adapter.rank,
        pages=adapter.num_pages,
        references=adapter.references,
        pinned=adapter.is_pinned,
        hits=adapter.history.hits,
        loads=adapter.history.loads,
        load_seconds=adapter.history.load_seconds,
        evictions=adapter.history.evictions,
        hits_device=adapter.history.requests_device,
        misses=adapter.history.requests_cold,
    )
