"""What a gateway process holds while it serves, built in one place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from redis.asyncio import Redis

from adapters.blob_store import BlobStore, open_store, read_file
from adapters.file_store import FileStore, open_files
from adapters.leases import EngineLeases
from adapters.registry import Registry
from gateway.accounts.admission import Admissions
from gateway.accounts.calls import CallLimits
from gateway.accounts.ledger import Ledger, open_ledger
from gateway.audit import Audit, trimming
from gateway.auth import Authenticator
from gateway.batches.files import Files
from gateway.batches.store import Batches
from gateway.engine_client import EngineFleet
from gateway.engine_metrics import EngineMetrics
from gateway.housekeeping import housekeeping
from gateway.keys import Keys
from gateway.known_adapters import KnownAdapters
from gateway.ledger_metrics import LedgerMetrics
from gateway.metrics import Metrics
from gateway.own_tokenizers import OwnTokenizers
from gateway.prices import PriceList, load_prices
from gateway.redis_client import connect
from gateway.redis_health import RedisHealth
from gateway.resolve import ModelResolver
from gateway.settings import GatewaySettings
from gateway.store_health import StoreHealth
from gateway.template_host import TemplateHost
from gateway.tenant_slots import Slots, download_slots, upload_slots
from gateway.tenants import Tenants
from gateway.tokenizer import Tokenizers
from gateway.upload_sessions import UploadSessions
from gateway.upload_transfers import UploadTransfers
from gateway.usage import UsageReader

if TYPE_CHECKING:
    from gateway.hub import Hub


@dataclass(frozen=True, slots=True)
class Services:
    """Everything that handlers use, through `request.app.state.services`. Nothing else is global."""

    settings: GatewaySettings
    redis: Redis
    redis_health: RedisHealth
    authenticator: Authenticator
    tenants: Tenants
    keys: Keys
    audit: Audit
    registry: Registry
    store: BlobStore
    store_health: StoreHealth
    engines: EngineFleet
    tokenizers: Tokenizers
    own_tokenizers: OwnTokenizers
    templates: TemplateHost
    models: ModelResolver
    metrics: Metrics
    admissions: Admissions
    calls: CallLimits
    ledger: Ledger
    usage: UsageReader
    prices: PriceList | None
    """None: the operator has given none."""
    hub: Hub | None
    """None: the operator allows no pulls."""
    upload_slots: Slots
    download_slots: Slots
    upload_sessions: UploadSessions
    upload_transfers: UploadTransfers
    file_store: FileStore
    files: Files
    batches: Batches


@asynccontextmanager
async def open_services(settings: GatewaySettings) -> AsyncIterator[Services]:
    """Builds the services, starts what runs in the background, and ends all of it on leaving.

    Waits for nothing: Redis and the engines may come later, and `/ready` says so until then.
    """
    async with AsyncExitStack() as stack:
        redis = connect(settings.redis_url)
        stack.push_async_callback(redis.aclose)
        tenants, keys, audit = Tenants(redis), Keys(redis), Audit(redis)
        await stack.enter_async_context(trimming(audit, settings.audit_days))
        health = RedisHealth(redis)
        stack.push_async_callback(health.close)
        authenticator = _authenticator(redis, health, settings)
        registry, store = Registry(redis), open_store(settings.store, settings.store_cache)
        known_adapters = KnownAdapters(redis, registry, health)
        store_health = StoreHealth(store)
        await _run_in(stack, authenticator, known_adapters, store_health)
        sessions = UploadSessions(store.scratch, settings.uploads_per_tenant)
        await stack.enter_async_context(
            housekeeping(registry, store, sessions, grace_s=settings.store_grace_s)
        )
        tokenizers, templates = Tokenizers(), TemplateHost()
        stack.push_async_callback(templates.close)
        engines = EngineFleet(EngineLeases(redis), tokenizers, resume_timeout_s=settings.resume_timeout_s)
        await _run_in(stack, engines)
        ledger = await stack.enter_async_context(
            open_ledger(redis, journal=settings.journal, lease_s=settings.lease_s, days=settings.ledger_days)
        )
        metrics = Metrics(
            EngineMetrics(engines.leases), LedgerMetrics(ledger.writer), labels=settings.metrics_labels
        )
        admissions = Admissions(
            redis, health, lease_ms=int(settings.lease_s * 1000), on_refusal=metrics.rejected
        )
        admissions.prepare()
        yield Services(
            settings=settings,
            redis=redis,
            redis_health=health,
            authenticator=authenticator,
            tenants=tenants,
            keys=keys,
            audit=audit,
            registry=registry,
            store=store,
            store_health=store_health,
            engines=engines,
            tokenizers=tokenizers,
            own_tokenizers=OwnTokenizers(tokenizers, partial(read_file, store)),
            templates=templates,
            models=ModelResolver(known_adapters, engines),
            metrics=metrics,
            admissions=admissions,
            calls=CallLimits(redis, health, metrics.rejected),
            ledger=ledger,
            usage=UsageReader(redis),
            prices=load_prices(settings.prices) if settings.prices else None,
            hub=_hub() if settings.allow_hub_pull else None,
            upload_slots=upload_slots(settings.uploads_per_tenant),
            download_slots=download_slots(),
            upload_sessions=sessions,
            upload_transfers=UploadTransfers(),
            file_store=open_files(settings.store, store),
            files=Files(redis),
            batches=Batches(redis, lease_s=settings.lease_s),
        )


def _authenticator(redis: Redis, health: RedisHealth, settings: GatewaySettings) -> Authenticator:
    return Authenticator(
        redis,
        health,
        operator_key=settings.operator_key,
        cache_s=settings.auth_cache_s,
        grace_s=settings.auth_grace_s,
    )


class _Follower(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


async def _run_in(stack: AsyncExitStack, *followers: _Follower) -> None:
    """Starts what follows Redis or the store, and has the stack end it."""
    for follower in followers:
        await follower.start()
        stack.push_async_callback(follower.close)


def _hub() -> Hub:
    from gateway.hub import Hub  # here, since its HTTP client takes a while to import

    return Hub()
