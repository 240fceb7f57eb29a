"""What the ledger's soak runs against: Valkey, fake engines and several gateways, and clients that may go.

Every process can be killed and started again. A request is known by its tenant and the length of its prompt,
on whichever side it is counted: no two have both in common.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from redis.asyncio import Redis

from gateway import probes
from gateway.keys import Keys
from gateway.limits import RateLimits, TenantLimits
from gateway.stack import ChildSpec, valkey_argv
from gateway.tenants import Tenants
from tests.e2e.processes import Service

LEASE_S = 2
NO_BOUND = 10**12
_LONGEST_S = 60.0
_LIMITS = TenantLimits(
    RateLimits(output_tokens_per_minute=NO_BOUND, concurrent_requests=NO_BOUND), tokens_per_month=NO_BOUND
)
"""Never met, but held: what requests take of them must come back."""
_TEXT = re.compile(rb'"text":"(?!")')
_USAGE = re.compile(rb'"usage":\{.*?"completion_tokens":(\d+)')


@dataclass
class Gateway:
    """A gateway's process, over all its lives."""

    service: Service
    port: int
    killed_at: list[float] = field(default_factory=list)  # time.monotonic()

    def kill(self) -> None:
        """kill -9."""
        self.service.kill()
        self.killed_at.append(time.monotonic())


@dataclass
class Answer:
    """What a client knows of its request. `status` is 0 where none came; `tokens` are those of the usage when
    the answer is complete, else the chunks that came. Times are by time.monotonic().
    """

    tenant: str
    prompt: int
    gateway: Gateway
    started_at: float
    ended_at: float = 0.0
    status: int = 0
    tokens: int = 0
    complete: bool = False

    @property
    def name(self) -> str:
        """As engines count it."""
        return f"{self.tenant}:{self.prompt}"

    def outlived(self, spare_s: float) -> bool:
        """Whether its gateway lived while it ran, and for a while after."""
        return not any(self.started_at <= at <= self.ended_at + spare_s for at in self.gateway.killed_at)


class LedgerStack:
    """Valkey with what it keeps, engines and gateways, all in `folder`."""

    def __init__(self, folder: Path, *, gateways: int, engines: int, tenants: int, step_s: float) -> None:
        self.folder = folder
        self.tenants = [f"t{number}" for number in range(tenants)]
        self.keys: dict[str, str] = {}
        redis_port, *ports = _free_ports(1 + gateways)
        self.redis_url = f"redis://127.0.0.1:{redis_port}/0"
        self.valkey = self._service(
            "valkey",
            valkey_argv(redis_port, folder / "valkey"),
            healthy=partial(probes.valkey_answers, redis_port),
        )
        self.engines = [self._engine(f"engine-{number}", step_s) for number in range(engines)]
        self.gateways = [
            Gateway(self._gateway(f"gateway-{number}", port), port) for number, port in enumerate(ports)
        ]

    def _service(self, name: str, argv: list[str], healthy: partial[object]) -> Service:
        environment = {"LORAPLEX_LEASE_S": str(LEASE_S), "LORAPLEX_JOURNAL": str(self.journal)}
        spec = ChildSpec(name, argv, "", healthy)  # type: ignore[arg-type]
        return Service(spec, self.folder / f"{name}.log", environment)

    def _engine(self, name: str, step_s: float) -> Service:
        argv = [sys.executable, "-m", "tests.gateway.fake_engine", "--redis-url", self.redis_url]
        argv += ["--engine-id", name, "--step-s", str(step_s), "--counts", str(self._counts(name))]
        return self._service(name, argv, healthy=partial(asyncio.sleep, 0, result=True))

    def _gateway(self, name: str, port: int) -> Service:
        argv = [sys.executable, "-m", "gateway", "gateway", "--port", str(port)]
        argv += ["--redis-url", self.redis_url, "--store", str(self.folder / "store")]
        return self._service(name, argv, partial(probes.gateway_ready, f"http://127.0.0.1:{port}"))

    def _counts(self, engine: str) -> Path:
        return self.folder / f"{engine}.json"

    @property
    def journal(self) -> Path:
        """Where gateways leave what Redis has not taken."""
        return self.folder / "journal"

    def start(self) -> None:
        """Starts everything, and makes a key for each tenant."""
        self.valkey.start()
        asyncio.run(self._make_keys())
        for service in (*self.engines, *(gateway.service for gateway in self.gateways)):
            service.launch()
        for gateway in self.gateways:
            gateway.service.wait_healthy()

    async def _make_keys(self) -> None:
        async with Redis.from_url(self.redis_url) as redis:
            for tenant in self.tenants:
                await Tenants(redis).create(tenant, tenant_id=tenant, limits=_LIMITS)
                self.keys[tenant] = (await Keys(redis).create(tenant))[1]

    def stop_gateways(self) -> None:
        """Has every gateway finish what it does and write its ledger."""
        for gateway in self.gateways:
            gateway.service.stop()

    def counted(self) -> dict[str, tuple[int, int]]:
        """Stops the engines. Returns how often they took each prompt, and how many tokens they gave."""
        total: dict[str, tuple[int, int]] = {}
        for engine in self.engines:
            engine.stop()
            counts: dict[str, tuple[int, int]] = json.loads(self._counts(engine.spec.name).read_text())
            for name, (taken, given) in counts.items():
                before = total.get(name, (0, 0))
                total[name] = before[0] + taken, before[1] + given
        return total

    def stop(self) -> None:
        """Ends whatever still runs."""
        for service in (*(gateway.service for gateway in self.gateways), *self.engines, self.valkey):
            service.stop()

    async def ask(
        self,
        gateway: Gateway,
        tenant: str,
        prompt: int,
        *,
        max_tokens: int,
        key: str | None = None,
        leave_after_s: float | None = None,
    ) -> Answer:
        """Completes a prompt of so many tokens, streamed or not. The client may leave before the end.

        Raises ConnectionError when nobody accepts its connection.
        """
        answer = Answer(tenant, prompt, gateway, time.monotonic())
        stream = random.Random(answer.name).random() < 0.7
        body: dict[str, object] = {"model": "tiny", "prompt": [5] * prompt, "max_tokens": max_tokens}
        body |= {"ignore_eos": True, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        received = bytearray()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        try:
            writer.write(_request(key or self.keys[tenant], body))
            async with asyncio.timeout(_LONGEST_S if leave_after_s is None else leave_after_s):
                while more := await reader.read(1 << 16):
                    received += more
        except OSError:
            pass  # the client has left, or its gateway
        finally:
            writer.transport.abort()
        answer.ended_at = time.monotonic()
        if received:
            answer.status = int(received.split(b" ", 2)[1])
            usage = _USAGE.findall(received)
            answer.complete = answer.status == 200 and bool(usage) and (not stream or b"[DONE]" in received)
            answer.tokens = int(usage[-1]) if answer.complete else len(_TEXT.findall(received))
        return answer


def _request(key: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, below those that the system gives to clients: each is bound several times."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found
