"""A gateway on a free port with fake engines behind it, all on one thread of its own; Redis is a real one."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import redis
import uvicorn
from openai import AsyncOpenAI, OpenAI
from pydantic import SecretStr
from redis.asyncio import Redis

from adapters.registry import Registry
from adapters.validation import AdapterSummary
from gateway.app import create_app
from gateway.http_protocol import BoundedHttp
from gateway.keys import Keys
from gateway.limits import NO_LIMITS, TenantLimits
from gateway.settings import GatewaySettings
from gateway.tenants import PrefixSharing, Tenants
from tests.gateway.fake_engine import FakeEngine

T = TypeVar("T")


@dataclass
class LocalStack:
    """`start` it, then talk to `url`. Methods are for the
    test's thread; `call` runs a coroutine on the stack's.
    """

    redis_url: str
    store: Path
    engines: list[FakeEngine] = field(default_factory=list)
    resume_timeout_s: float = 5.0
    operator_key: str | None = None
    grpc: bool = False
    """Whether it serves gRPC, too: on `grpc_address`."""

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.call(self._start())

    def stop(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def ready(self) -> Iterator[LocalStack]:
        """Starts it, yields it when it can answer, and stops it."""
        self.start()
        try:
            self.wait_ready()
            yield self
        finally:
            self.stop()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=120)

    async def _start(self) -> None:
        for engine in self.engines:
            await engine.start()
        settings = GatewaySettings(
            redis_url=self.redis_url,
            store=str(self.store),
            journal=self.store.parent / "journal",
            resume_timeout_s=self.resume_timeout_s,
            operator_key=SecretStr(self.operator_key) if self.operator_key else None,
            port=0,
            grpc_port=0 if self.grpc else None,
        )  # type: ignore[call-arg]
        self.app = create_app(settings)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, http=BoundedHttp, log_level="warning", lifespan="on")
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def _stop(self) -> None:
        self._server.should_exit = True
        await self._serving
        for engine in self.engines:
            await engine.stop()

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.app.state.grpc_port}"

    def wait_ready(self) -> None:
        wait_until(lambda: httpx.get(f"{self.url}/ready").status_code == 200, "the gateway is ready")

    def add_tenant(
        self,
        tenant: str,
        sharing: PrefixSharing = PrefixSharing.PRIVATE,
        limits: TenantLimits = NO_LIMITS,
    ) -> str:
        """Makes a tenant and returns a key of it."""

        async def add() -> str:
            async with Redis.from_url(self.redis_url) as redis:
                await Tenants(redis).create(tenant, tenant_id=tenant, prefix_sharing=sharing, limits=limits)
                return (await Keys(redis).create(tenant))[1]

        return self.call(add())

    def add_adapter(self, tenant: str, name: str, digest: bytes, **more: Any) -> None:
        """Registers a version, without its files: fake engines need none. `more`: of its summary."""

        async def add() -> None:
            async with Redis.from_url(self.redis_url) as redis:
                await Registry(redis).add_version(
                    tenant, name, AdapterSummary(digest, 8, 4, 1000, None, ("q_proj",), **more)
                )

        self.call(add())

    def client(self, key: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def async_client(self, key: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Polls until the condition holds; fails the test when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain until {what}"
        time.sleep(0.01)


def emptied(url: str) -> str:
    """The URL of a Redis database, in which nothing is left."""
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url
