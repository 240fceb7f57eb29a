"""`loraplex gateway`: the HTTP server."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway import memory
from gateway.commands.exits import CommandFailed, Exit
from gateway.ports import address_of, fault_of_port

if TYPE_CHECKING:
    import uvicorn

    from adapters.blob_store import BlobStore
    from gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_STARTED_POLL_S = 0.02
_CHECK_S = 5.0
_SHUTDOWN_S = 10


def gateway(
    host: Annotated[str | None, typer.Option(help="Address to bind. Default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind. Default 8000.")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the gRPC service for clients. Default none.")
    ] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis or Valkey to use.")] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Folder or s3://bucket/prefix of the adapters' files, as engines have it."),
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(help="Local folder for what the ledger cannot tell Redis. Default var/journal."),
    ] = None,
) -> None:
    """Run a gateway: the OpenAI API, tenants and keys in front of the engines.

    Each flag may come from the environment instead, as LORAPLEX_HOST, LORAPLEX_PORT, LORAPLEX_GRPC_PORT,
    LORAPLEX_REDIS_URL, LORAPLEX_STORE and LORAPLEX_JOURNAL. The first gateway on an empty Redis prints the
    operator's key, unless LORAPLEX_OPERATOR_KEY holds one.
    """
    memory.share_one_heap()
    _suit_one_loop()
    gc.disable()  # it would look for garbage among what is imported, over and over: see `_started`
    given = {
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "redis_url": redis_url,
        "store": store,
        "journal": journal,
    }
    settings = _settings({key: value for key, value in given.items() if value is not None})
    opened = _open_store(settings)
    _check_ports(settings)
    import uvloop

    uvloop.run(_serve(settings, opened))


def _suit_one_loop() -> None:
    """Has libraries do their work with few threads, in the only way that they can be told: before any of them
    is imported, and unless the operator has told them otherwise.
    """
    # One text needs one thread: tokenizers would hand it to a pool's and wait, which takes as long again.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # gRPC's older poller hands what comes from its thread to ours; the newer one has a pool between, and
    # switches between threads twice as often.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")


def _settings(given: dict[str, Any]) -> GatewaySettings:
    from pydantic import ValidationError

    from gateway.settings import GatewaySettings

    try:
        return GatewaySettings(**given)
    except ValidationError as error:
        faults = [
            f"LORAPLEX_{fault['loc'][0]}".upper() + f": {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors()
        ]
        raise CommandFailed("; ".join(faults), Exit.USAGE) from None


def _check_ports(settings: GatewaySettings) -> None:
    """Raises CommandFailed for a port that cannot be had. Servers would say so later, and not as clearly."""
    wanted = [("--port", settings.port)]
    if settings.grpc_port is not None:
        wanted.append(("--grpc-port", settings.grpc_port))
    for flag, port in wanted:
        if fault := fault_of_port(settings.host, port):
            raise CommandFailed(f"Port {port} {fault}; choose another with {flag}.", Exit.REFUSED)


def _open_store(settings: GatewaySettings) -> BlobStore:
    from adapters.blob_store import open_store

    try:
        return open_store(settings.store, settings.store_cache)
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"The store '{settings.store}' cannot be used ({reason}). Choose another with --store."
        raise CommandFailed(message, Exit.REFUSED) from None


async def _serve(settings: GatewaySettings, store: BlobStore) -> None:
    """Serves until a signal ends it; streams get a while to finish. With a store that is not that of this
    Redis, or refuses, it ends at once, or when that is known.
    """
    import uvicorn

    from gateway.app import create_app
    from gateway.http_protocol import BoundedHttp
    from gateway.redaction import RedactingFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    for library in ("httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            http=BoundedHttp,
            ws="none",
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
    )
    checking = asyncio.create_task(_has_right_store(settings, store))
    await asyncio.wait([checking], timeout=_CHECK_S)  # a store that hangs keeps nobody from Redis and engines
    is_right = checking.done() and checking.result()
    beside = [asyncio.create_task(_announce_operator_key(settings)), asyncio.create_task(_started(server))]
    if not is_right:
        beside.append(asyncio.create_task(_check_store_later(checking, settings, store, server)))
    try:
        await server.serve()
    finally:
        for task in beside:
            task.cancel()
        ends = await asyncio.gather(*beside, return_exceptions=True)
    for fault in ends:
        if isinstance(fault, CommandFailed):
            raise fault
    if not server.started:
        address = address_of(settings.host, settings.port)
        raise CommandFailed(f"The gateway could not start on {address}.", Exit.REFUSED)


async def _started(server: uvicorn.Server) -> None:
    """Logs where the gateway listens, once it does, and has garbage collected from now on."""
    while not server.started:
        await asyncio.sleep(_STARTED_POLL_S)
    # What is there stays: to walk through it would hold up requests for some 30 ms each time.
    gc.freeze()
    gc.enable()
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    logger.info("gateway listens on http://%s", address_of(host, port))


async def _has_right_store(settings: GatewaySettings, store: BlobStore) -> bool:
    """Whether the store is that of this Redis; False while one of them cannot be reached. Raises
    CommandFailed where it is another's, or refuses.
    """
    from redis.exceptions import RedisError

    from adapters.blob_store import StoreRefused
    from adapters.store_identity import WrongStore, check_identity
    from gateway.redis_client import connect

    async with connect(settings.redis_url) as redis:
        try:
            await check_identity(redis, store, settings.store)
        except WrongStore as fault:
            raise CommandFailed(str(fault), Exit.REFUSED) from None
        except StoreRefused as fault:
            message = f"The store '{settings.store}' cannot be used. {fault}"
            raise CommandFailed(message, Exit.REFUSED) from None
        except (RedisError, OSError):
            return False
    return True


async def _check_store_later(
    checking: asyncio.Task[bool], settings: GatewaySettings, store: BlobStore, server: uvicorn.Server
) -> None:
    """Has the server end when the store turns out to be another's, or to refuse. Raises CommandFailed, which
    says so. `checking` is the first look at it.
    """
    try:
        is_right = await checking
        while not is_right:
            await asyncio.sleep(_RETRY_S)
            is_right = await _has_right_store(settings, store)
    except CommandFailed:
        server.should_exit = True
        raise


async def _announce_operator_key(settings: GatewaySettings) -> None:
    """Prints the operator's key if this start is the first
    on its Redis; waits for Redis as long as it takes."""
    from redis.exceptions import RedisError

    from gateway.auth import ensure_operator_key
    from gateway.keys import Keys
    from gateway.redis_client import connect

    async with connect(settings.redis_url) as redis:
        while True:
            try:
                key = await ensure_operator_key(Keys(redis), settings.operator_key)
                break
            except (RedisError, OSError):
                await asyncio.sleep(_RETRY_S)
    if key:
        typer.echo(f"The operator's key, shown this once: {key}")
        typer.echo("Lost it? Start the gateway with LORAPLEX_OPERATOR_KEY set to a key of your own.")
