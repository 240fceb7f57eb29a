"""The life of an engine process, from a loaded model to its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import signal
import time
from collections.abc import Callable

from adapters.leases import EngineLease
from adapters.registry.desired import DesiredAdapters
from engine.assembly import Core
from engine.registration import Registration
from engine.server import EngineServer
from engine.service import EngineService
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)


class _End:
    """How the process is to end, once `requested`."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.at_once = asyncio.Event()
        self.status = 0

    def gently(self) -> None:
        logger.info("told to stop: taking no new requests, waiting for those under way")
        self.requested.set()

    def now(self) -> None:
        self.requested.set()
        self.at_once.set()

    def with_failure(self) -> None:
        self.status = 1
        self.now()


async def serve(core: Core, settings: EngineSettings, *, started: float) -> int:
    """Serves until a signal, or until the loop cannot go on. Returns the process's exit status.

    Starts with the server, then the lease; ends with draining, the lease, the server and the loop. Reads of
    adapters may go on, and are not waited for.

    Args:
        started: `time.monotonic` when the process started.

    Raises:
        CannotListen: the address is taken.
        ValueError: the URL of Redis is none.
    """
    events, end = asyncio.get_running_loop(), _End()
    events.add_signal_handler(signal.SIGTERM, end.gently)
    events.add_signal_handler(signal.SIGINT, end.now)
    service = EngineService(
        core.loop, core.model_info, core.tokenizer_files, core.store.contains, core.grammars
    )
    server = EngineServer(service)
    port = await server.start(f"{settings.host}:{settings.port}")
    gc.collect()
    gc.freeze()
    core.loop.start(
        deliver=lambda news: _post(events, service.take_news, news),
        on_fatal=lambda: _post(events, end.with_failure),
    )
    registration = _register(core, settings, service, settings.advertised(port))
    seconds = time.monotonic() - started
    logger.info("engine ready on %s:%d after %.1f s: %s", settings.host, port, seconds, _summary(core))

    await end.requested.wait()
    if not end.at_once.is_set():
        await _drain(server, registration, settings.drain_seconds, end)
    if registration is not None:
        await registration.stop()
    await server.stop()
    core.loop.stop()
    core.tiers.close()
    return end.status


async def _drain(
    server: EngineServer, registration: Registration | None, timeout_s: float, end: _End
) -> None:
    """Says so in the lease and waits for requests to end, unless told not to wait after all."""
    tasks = [asyncio.create_task(server.drain(timeout_s))]
    await asyncio.sleep(0)
    if registration is not None:
        tasks.append(asyncio.create_task(registration.renew()))
    gently, at_once = asyncio.create_task(asyncio.wait(tasks)), asyncio.create_task(end.at_once.wait())
    await asyncio.wait([gently, at_once], return_when=asyncio.FIRST_COMPLETED)
    for task in (*tasks, gently, at_once):
        task.cancel()


def _register(
    core: Core, settings: EngineSettings, service: EngineService, address: str
) -> Registration | None:
    """Starts to announce the engine, and to follow what is desired of it.

    Its id is made of its address, so that it keeps its place after a restart, and does not tell it, since
    tenants are shown where their adapters are.
    """
    if settings.redis_url is None:
        logger.info("no --redis-url: gateways will not find this engine")
        return None
    info = core.model_info
    engine_id = "engine-" + hashlib.sha256(address.encode()).hexdigest()[:8]
    logger.info("this engine is %s, at %s", engine_id, address)
    if settings.is_local_only:
        logger.warning("gateways on other machines cannot reach %s: set --host and --advertise", address)

    async def make_lease() -> EngineLease:
        status = await service.status()
        return EngineLease(
            engine_id=engine_id,
            address=address,
            model=info.name,
            model_digest=info.digest,
            max_model_len=info.max_model_len,
            residency={digest.hex(): tier.name.lower() for digest, tier in status.residency.items()},
            running=status.running,
            waiting=status.waiting,
            free_blocks=status.free_blocks,
            draining=service.is_draining,
            adapters={**status.adapter_memory.figures(), **status.scheduling},
        )

    def follow(desired: DesiredAdapters) -> None:
        core.loop.pin(desired.pinned)
        for digest in desired.gone:
            core.loop.unload(digest)

    try:
        registration = Registration(settings.redis_url, make_lease, follow, core.store.copies)
    except ValueError as error:
        raise ValueError(f"--redis-url: {error}") from error
    registration.start()
    return registration


def _summary(core: Core) -> str:
    info = core.model_info
    tokens = info.num_blocks * info.block_size
    return (
        f"{info.name} in {info.dtype}, KV for {tokens} tokens, {info.num_rank_pages} rank pages for adapters"
    )


def _post(events: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Calls back on the server's event loop, unless that has closed while the process ends."""
    with contextlib.suppress(RuntimeError):
        events.call_soon_threadsafe(callback, *args)
