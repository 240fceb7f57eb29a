"""`loraplex up` with real processes: each is killed in turn, and in the end nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from examples.smollm2 import gguf_file

ROOT = Path(__file__).parents[2]
OPERATOR_KEY = "the operator's key of this test"
START_LIMIT_S = 120

pytestmark = pytest.mark.e2e


@dataclass
class Up:
    """A running `loraplex up`."""

    process: asyncio.subprocess.Process
    ports: dict[str, int]
    log: Path
    url: str

    def children(self) -> dict[str, int]:
        """The pids of the stack's processes, by name."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
        found: dict[str, int] = {}
        for pid, words in commands.items():
            for name, word in (("valkey", "valkey-server"), ("engine", "engine"), ("gateway", "gateway")):
                if any(word == Path(part.split(" ")[0]).name for part in words):
                    found.setdefault(name, pid)
        return found

    async def until_said(self, line: str, times: int = 1) -> None:
        """Waits until the command has printed this so many times."""
        async with asyncio.timeout(START_LIMIT_S):
            while self.log.read_text().count(line) < times:
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.1)


@asynccontextmanager
async def loraplex_up(folder: Path) -> AsyncIterator[Up]:
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in ("port", "engine-port", "redis-port")}
    ports = {name: listener.getsockname()[1] for name, listener in sockets.items()}
    for listener in sockets.values():
        listener.close()
    flags = [word for name, port in ports.items() for word in (f"--{name}", str(port))]
    log = folder / "up.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "gateway",
                "up",
                "--model",
                str(gguf_file()),
                "--data-dir",
                str(folder / "var"),
            ),
            *(*flags, "--", "--max-model-len", "1024", "--max-num-seqs", "8"),
            env={**os.environ, "LORAPLEX_OPERATOR_KEY": OPERATOR_KEY, "OMP_NUM_THREADS": "2"},
            stdout=output,
            stderr=output,
        )
    up = Up(process, ports, log, f"http://127.0.0.1:{ports['port']}")
    try:
        yield up
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def test_each_process_is_killed_in_turn_and_the_adapters_answer_after(tmp_path: Path) -> None:
    async with loraplex_up(tmp_path) as up:
        await up.until_said("Loraplex serves")
        async with httpx.AsyncClient(base_url=up.url, timeout=90) as client:
            pirate = await _tenant_with_pirate(client)
            before = await _answer(client, pirate)
            for name in ("valkey", "gateway", "engine"):
                os.kill(up.children()[name], signal.SIGKILL)
                await up.until_said(f"{name} was killed by SIGKILL; starting it again")
                await up.until_said(f"{name} is ready", times=2)
                assert await _answer(client, pirate) == before, name
        children = up.children()
        assert set(children) == {"valkey", "gateway", "engine"}
        up.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(up.process.wait(), 60) == 0
        assert up.log.read_text().rstrip().endswith("stopped")
        assert not any(Path(f"/proc/{pid}").exists() for pid in children.values())
        for port in up.ports.values():
            socket.create_server(("127.0.0.1", port)).close()
        assert not list((tmp_path / "var" / "store" / "staging").iterdir())


async def _tenant_with_pirate(client: httpx.AsyncClient) -> dict[str, str]:
    """Makes a tenant with the example's adapter `pirate`. Returns the headers with its key."""
    operator = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    await client.post("/admin/tenants", headers=operator, json={"id": "acme", "name": "Acme"})
    key = (await client.post("/admin/tenants/acme/keys", headers=operator, json={})).json()["key"]
    headers = {"Authorization": f"Bearer {key}"}
    folder = ROOT / "examples" / "adapters" / "pirate"
    files = [
        ("files", (name, (folder / name).read_bytes()))
        for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
    uploaded = await client.post("/v1/adapters", headers=headers, data={"name": "pirate"}, files=files)
    assert uploaded.status_code == 201, uploaded.text
    return headers


async def _answer(client: httpx.AsyncClient, headers: dict[str, str]) -> str:
    body = {
        "model": "pirate",
        "messages": [{"role": "user", "content": "Say hi"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    async with asyncio.timeout(30):
        while True:
            answer = await client.post("/v1/chat/completions", headers=headers, json=body)
            if answer.status_code != 503:  # the gateway finds an engine that came back within a second or two
                break
            await asyncio.sleep(0.2)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]
