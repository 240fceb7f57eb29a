"""The stack's processes, each started by its own real command, and each to be killed and started alone.

`loraplex up` watches its children and starts them again; here the test does both, so that it can look at what
the others say and do while one is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI
from redis.asyncio import Redis

from adapters.leases import EngineLease, EngineLeases
from examples.local_stack import BIN, Ports
from examples.smollm2 import gguf_file
from gateway import guarded
from gateway.stack import ChildSpec, StackPlan, plan_children
from tests.ports import reserve_ports

ROOT = Path(__file__).resolve().parents[2]
BASE = "smollm2"
OPERATOR_KEY = "operator-key-of-the-tests-own"
PIRATE, JSON = (ROOT / "examples" / "adapters" / name for name in ("pirate", "json"))
EXACT = ("--served-model-name", BASE, "--dtype", "float32")
"""Engine flags with which the same request gives the same text, whatever else is in the batch."""
START_S = 120.0
FOREVER: dict[str, Any] = {"ignore_eos": True}


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    """Polls until the condition holds; fails the test when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain until {what}"
        time.sleep(0.02)


class Service:
    """One process of the stack. What it says is kept in `log`, over all its lives."""

    def __init__(self, spec: ChildSpec, log: Path, environment: Mapping[str, str]) -> None:
        self.spec = spec
        self.log = log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Starts the process, which ends when this one does."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guarded.__file__, str(os.getpid()), *self.spec.argv],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_healthy(self) -> None:
        """Waits until it serves. Fails the test with what it said when it ends instead."""
        asyncio.run(self._wait_healthy())

    async def _wait_healthy(self) -> None:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + START_S
        while not await self.spec.healthy():
            assert process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            await asyncio.sleep(0.05)

    def start(self) -> None:
        self.launch()
        self.wait_healthy()

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does nothing during the block, unless it is killed meanwhile."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Asks it to end, and kills it if it has not soon."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.kill()

    def lines(self, *words: str, since: int = 0) -> list[str]:
        """The lines logged after the first `since` bytes; with `words`, those that hold one of them."""
        text = self.log.read_bytes()[since:].decode()
        return [line for line in text.splitlines() if not words or any(word in line for word in words)]

    def log_end(self) -> int:
        """How many bytes it has logged so far."""
        return self.log.stat().st_size


class Stack:
    """Valkey, an engine and a gateway on free ports, with all that they keep in `folder`.

    `model` is a Hugging Face folder; without it, the stack runs the real model.
    """

    def __init__(
        self, folder: Path, engine_args: Sequence[str], *, model: Path | None = None, **environment: str
    ) -> None:
        self.ports = Ports(*reserve_ports(3))
        self.url = f"http://127.0.0.1:{self.ports.gateway}"
        self.engine_address = f"127.0.0.1:{self.ports.engine}"
        self.redis_url = f"redis://127.0.0.1:{self.ports.redis}/0"
        plan = StackPlan(
            model=str(model or gguf_file()),
            host="127.0.0.1",
            port=self.ports.gateway,
            engine_port=self.ports.engine,
            redis_port=self.ports.redis,
            redis_url=None,
            data_dir=folder,
            engine_args=engine_args,
        )
        self.store = plan.store
        settings = {"LORAPLEX_OPERATOR_KEY": OPERATOR_KEY, "OMP_NUM_THREADS": "2", **environment}
        self._services = {
            spec.name: Service(spec, spec.log or folder / f"{spec.name}.log", settings)
            for stage in plan_children(plan)
            for spec in stage
        }
        self.valkey, self.engine, self.gateway = (
            self._services[name] for name in ("valkey", "engine", "gateway")
        )

    def start(self) -> None:
        self.valkey.start()
        self.engine.launch()
        self.gateway.launch()
        self.engine.wait_healthy()
        self.gateway.wait_healthy()

    def stop(self) -> None:
        for service in (self.gateway, self.engine, self.valkey):
            service.stop()

    def assert_calm(self) -> None:
        """Nothing in all that was logged looks like a fault of ours."""
        for service in (self.gateway, self.engine):
            assert not service.lines("Traceback", " ERROR "), service.log.read_text()

    # ---- as an operator and as tenants ------------------------------------------------------------------

    def create_tenant(self, tenant: str) -> str:
        """Makes a tenant and returns a key of it."""
        return create_tenant(self.url, OPERATOR_KEY, tenant)

    def upload(self, folder: Path, name: str, key: str) -> None:
        """Uploads an adapter with the `adapters` command."""
        done = adapters_command("upload", str(folder), "--name", name, url=self.url, key=key)
        assert done.returncode == 0, done.stderr

    def client(self, key: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=START_S)

    def async_client(self, key: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=START_S)

    # ---- as Prometheus and as a gateway see it ----------------------------------------------------------

    async def lease(self) -> EngineLease:
        """What the engine last said of itself; up to a second old."""
        async with Redis.from_url(self.redis_url) as redis:
            (lease,) = await EngineLeases(redis).live()
        return lease

    async def renewed_lease(self) -> EngineLease:
        """What the engine says of itself in its next renewal but one: it is asked after this call."""
        async with Redis.from_url(self.redis_url) as redis:
            for _ in range(2):
                before = await self._expiry(redis)
                while await self._expiry(redis) <= before:
                    await asyncio.sleep(0.02)
        return await self.lease()

    async def _expiry(self, redis: Redis) -> int:
        """When the lease ends, in ms of Redis' own clock; each renewal moves it."""
        (lease,) = await EngineLeases(redis).live()
        return await redis.pexpiretime(f"loraplex:{{engines}}:lease:{lease.engine_id}")

    async def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.url}/metrics")).text
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def create_tenant(url: str, operator_key: str, tenant: str) -> str:
    """Makes a tenant over HTTP and returns a key of it."""
    headers = {"Authorization": f"Bearer {operator_key}"}
    with httpx.Client(base_url=f"{url}/admin", headers=headers, timeout=30) as client:
        client.post("/tenants", json={"id": tenant, "name": tenant.title()}).raise_for_status()
        return client.post(f"/tenants/{tenant}/keys", json={}).raise_for_status().json()["key"]


def adapters_command(*arguments: str, url: str, key: str) -> subprocess.CompletedProcess[str]:
    """Runs the `adapters` command to its end."""
    return subprocess.run(
        [str(BIN / "adapters"), *arguments],
        env={**os.environ, "LORAPLEX_URL": url, "LORAPLEX_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
