"""Show on SmolLM2 what tenants get of a busy engine: first tokens of the small, shares by weight, throughput.

    python benchmarks/fairness.py            # some ten minutes on two cores
    python benchmarks/fairness.py --quick    # whether it works, in two

Starts the stack itself, on free ports and a temporary folder, with room for eight adapters and eight
sequences at once. Four arms, one after the other, and before them some requests that count nowhere, since
what is done for the first time takes long:

- alone: a tenant sends a short request every second, each for an adapter that the engine does not have.
- flood: the same, while another tenant's 200 long requests over eight adapters are served.
- first come, first served: the same requests, all of one tenant, within which that is the order.
- weights: two tenants with 200 requests each, weights 1 and 2.

Compare the arms with one another: the machine's load meets all of them alike, more or less, and the number of
cores that others kept busy stands beside each. Writes JSON into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from adapters.client import AdaptersClient, ClientError
from benchmarks import machine, serve
from benchmarks.random_adapters import page_bytes, write_adapter
from benchmarks.stack import BASE, KV_BYTES, RESULTS
from examples.local_stack import LocalStack, StackFailed, free_ports, local_stack
from examples.smollm2 import gguf_file
from protos.engine_pb2 import UnloadAdapterRequest
from protos.engine_pb2_grpc import EngineStub

RANK = 8
ROOM = 8
SHORT_PROMPT, SHORT_OUTPUT = 20, 8
HEAD_START_S = 4.0
"""The flood's first prompts are computed by then."""
INPUT_COST, OUTPUT_COST = 1, 2
"""What a token counts as service; as in the engine."""
TTFT_REACH, THROUGHPUT_REACH, SHARE_REACH = 2.0, 0.95, 0.1

console = Console()


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    requests: int = 200
    prompt_tokens: int = 128
    output_tokens: int = 160
    shared_output_tokens: int = 80
    """In the arm of weights."""
    alone: int = 60
    beside: int = 120
    window_s: float = 60.0


WARM_UP = Size(requests=2 * ROOM, output_tokens=16, alone=5, beside=0)
QUICK = Size(requests=32, output_tokens=48, shared_output_tokens=32, alone=6, beside=8, window_s=10.0)


@dataclass(frozen=True)
class Sent:
    """A request that was answered, by `time.perf_counter`."""

    at: float
    timing: serve.Timing

    @property
    def ended(self) -> float:
        return self.at + self.timing.arrivals[-1]


class Tenant:
    """One tenant's client. Use it as an async context manager."""

    def __init__(self, url: str, key: str, size: Size, *, seed: int) -> None:
        load = serve.Load(url=url, models=(), api_key=key, prompt_tokens=size.prompt_tokens)
        self._size = size
        self._client = serve.Client(load)
        self._long = serve.make_prompts(_load(load, size.requests, size.prompt_tokens, seed), 1.0)
        self._short = serve.make_prompts(_load(load, size.alone + size.beside, SHORT_PROMPT, -seed), 1.0)

    async def __aenter__(self) -> Tenant:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.__aexit__(*exception)

    async def flood(self, output_tokens: int) -> list[Sent]:
        """Sends all long requests at once, over `ROOM` adapters."""
        requests = enumerate(self._long)
        sent = (self._send(f"long-{index % ROOM}", prompt, output_tokens) for index, prompt in requests)
        return await asyncio.gather(*sent)

    async def trickle(self, numbers: range) -> list[Sent]:
        """Sends a short request every second, each for an adapter of its own."""
        sent: list[asyncio.Task[Sent]] = []
        begin = time.perf_counter()
        for count, number in enumerate(numbers):
            await asyncio.sleep(max(0.0, begin + count - time.perf_counter()))
            request = self._send(f"cold-{number}", self._short[number], SHORT_OUTPUT)
            sent.append(asyncio.create_task(request))
        return await asyncio.gather(*sent)

    async def _send(self, model: str, prompt: str, output_tokens: int) -> Sent:
        at = time.perf_counter()
        return Sent(at, await self._client.complete(model, prompt, output_tokens))


def _load(load: serve.Load, count: int, prompt_tokens: int, seed: int) -> serve.Load:
    return serve.Load(load.url, (), num_requests=count, prompt_tokens=prompt_tokens, seed=seed)


def prepare(stack: LocalStack, size: Size) -> tuple[dict[str, str], list[str]]:
    """Makes the tenants and their adapters. Returns a key of each tenant, and the cold ones' digests."""
    create = ("tenants", "create")
    keys: dict[str, str] = {}
    for tenant, weight in (("flood", 1), ("small", 1), ("heavy", 2), ("all", 1)):
        arguments = (*create, tenant.title(), "--id", tenant, "--weight", str(weight))
        stack.command("loraplex", *arguments, key=stack.operator_key)
        keys[tenant] = stack.command("loraplex", "keys", "create", tenant, key=stack.operator_key)
    owners = {f"long-{number}": ("flood", "heavy", "all") for number in range(ROOM)}
    owners |= {f"cold-{number}": ("small", "all") for number in range(size.alone + size.beside)}
    digests: list[str] = []
    with tempfile.TemporaryDirectory(prefix="loraplex-adapters-") as root, ExitStack() as opened:
        clients = {
            tenant: opened.enter_context(AdaptersClient(stack.url, key)) for tenant, key in keys.items()
        }
        for seed, (name, tenants) in enumerate(owners.items()):
            folder = Path(root) / name
            write_adapter(folder, rank=RANK, seed=seed)
            uploads = [clients[tenant].upload(folder, name, on_sent=lambda count: None) for tenant in tenants]
            shutil.rmtree(folder)
            if name.startswith("cold"):
                digests.append(uploads[0]["digest"])
    return keys, digests


async def small_beside_flood(small: Tenant, flood: Tenant, size: Size) -> dict[str, Any]:
    """One tenant's flood, and after a moment another's short requests; the same tenant twice is one queue."""
    flooding = asyncio.create_task(flood.flood(size.output_tokens))
    await asyncio.sleep(HEAD_START_S)
    short = await small.trickle(range(size.alone, size.alone + size.beside))
    long = await flooding
    return {"ttft_ms": ttft_ms(short), "tokens_per_second": round(throughput([*short, *long]), 1)}


def throughput(sent: Sequence[Sent]) -> float:
    """Output tokens a second, from the first request to the last token."""
    seconds = max(one.ended for one in sent) - min(one.at for one in sent)
    return sum(one.timing.output_tokens for one in sent) / seconds


def ttft_ms(sent: Sequence[Sent]) -> dict[str, float]:
    """Percentiles of the time to the first token."""
    values = 1000 * np.array([one.timing.ttft for one in sent])
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    named = {"p50": p50, "p90": p90, "p99": p99, "max": values.max()}
    return {name: round(float(value), 1) for name, value in named.items()}


def shares(light: Sequence[Sent], heavy: Sequence[Sent], window_s: float) -> list[float]:
    """The heavy tenant's service to the light one's, in each window while both had requests waiting."""
    begin = min(one.at for one in (*light, *heavy))
    end = min(max(one.at + one.timing.ttft for one in sent) for sent in (light, heavy))
    steps = np.arange(begin, end - window_s, 1.0)
    served = [_served(sent, steps + window_s) - _served(sent, steps) for sent in (light, heavy)]
    return [round(float(ratio), 3) for ratio in served[1] / served[0]]


def _served(sent: Sequence[Sent], times: np.ndarray) -> np.ndarray:
    """A tenant's service by the given times: a prompt counts when its first token has come."""
    events: list[tuple[float, float]] = []
    for one in sent:
        events.append((one.at + one.timing.ttft, INPUT_COST * one.timing.prompt_tokens))
        cost = OUTPUT_COST * one.timing.output_tokens / len(one.timing.arrivals)
        events += [(one.at + arrival, cost) for arrival in one.timing.arrivals]
    events.sort()
    sums = np.concatenate([[0.0], np.cumsum([cost for _, cost in events])])
    return sums[np.searchsorted([at for at, _ in events], times, side="right")]


async def forget(port: int, digests: Sequence[str]) -> None:
    """Has the engine forget adapters, so that they are cold again."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = EngineStub(channel)
        for digest in digests:
            await stub.UnloadAdapter(UnloadAdapterRequest(digest=bytes.fromhex(digest)))


async def measure(
    stack: LocalStack, keys: dict[str, str], digests: Sequence[str], size: Size, port: int
) -> dict[str, Any]:
    """All arms, one after the other. No two of them have prompts in common, or they would be found cached."""
    url = f"{stack.url}/v1"
    async with (
        Tenant(url, keys["small"], size, seed=1) as small,
        Tenant(url, keys["flood"], size, seed=2) as flood,
        Tenant(url, keys["all"], size, seed=3) as everybody,
        Tenant(url, keys["flood"], size, seed=4) as light,
        Tenant(url, keys["heavy"], size, seed=5) as heavy,
        Tenant(url, keys["all"], WARM_UP, seed=6) as first,
    ):

        async def alone() -> dict[str, Any]:
            return {"ttft_ms": ttft_ms(await small.trickle(range(size.alone)))}

        async def weights() -> dict[str, Any]:
            ones, twos = await asyncio.gather(
                light.flood(size.shared_output_tokens), heavy.flood(size.shared_output_tokens)
            )
            return {"shares": shares(ones, twos, size.window_s)}

        await asyncio.gather(first.flood(WARM_UP.output_tokens), first.trickle(range(WARM_UP.alone)))
        await forget(port, digests)
        arms = {
            "alone": await _timed("alone", alone()),
            "flood": await _timed("flood", small_beside_flood(small, flood, size)),
        }
        await forget(port, digests)
        arms["first come"] = await _timed("first come", small_beside_flood(everybody, everybody, size))
        arms["weights"] = await _timed("weights", weights())
    return arms


async def _timed(name: str, arm: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Runs an arm. Returns its figures, and how busy others kept the machine meanwhile."""
    meter = machine.NeighbourMeter(lambda: machine.process_tree(os.getpid()))
    figures = await arm | {"busy_cores": meter.read().busy_cores}
    console.print(f"{name}: {figures}", markup=False, highlight=False)
    return figures


def run(size: Size) -> dict[str, Any]:
    """Measures everything, and returns it as a JSON document. Raises StackFailed."""
    flags = ["--served-model-name", BASE, "--dtype", "bfloat16", "--kv-cache-memory-bytes", str(KV_BYTES)]
    flags += ["--max-num-seqs", str(ROOM), "--lora-memory-bytes", str(ROOM * page_bytes(2))]
    ports = free_ports()
    with local_stack(gguf_file(), ports, flags) as stack:
        keys, digests = prepare(stack, size)
        arms = asyncio.run(measure(stack, keys, digests, size, ports.engine))
    return {"machine": machine.facts(), "size": asdict(size), "engine_args": flags, "arms": arms}


def show(document: dict[str, Any]) -> None:
    """Prints the figures beside those to reach."""
    facts, arms = document["machine"], document["arms"]
    table = Table(title=f"{facts['cpu']}, {facts['cores']} cores", title_justify="left")
    table.add_column("arm")
    for heading in ("TTFT p50 / p90 / p99, ms", "tokens/s", "others' cores"):
        table.add_column(heading, justify="right")
    for name, arm in arms.items():
        times = arm.get("ttft_ms", {})
        rate = arm.get("tokens_per_second")
        table.add_row(
            name,
            " / ".join(f"{times[key]:.0f}" for key in ("p50", "p90", "p99")) if times else "",
            f"{rate:.1f}" if rate else "",
            f"{arm['busy_cores']:.2f}",
        )
    console.print(table)
    slower = arms["flood"]["ttft_ms"]["p99"] / arms["alone"]["ttft_ms"]["p99"]
    kept = arms["flood"]["tokens_per_second"] / arms["first come"]["tokens_per_second"]
    ratios = arms["weights"]["shares"] or [float("nan")]
    console.print(f"p99 of the first token beside a flood, to alone: {slower:.2f} (≤ {TTFT_REACH})")
    console.print(f"throughput, to first come, first served: {kept:.3f} (≥ {THROUGHPUT_REACH})")
    console.print(
        f"service of weight 2 to weight 1, over any window: {min(ratios):.2f} to {max(ratios):.2f} "
        f"(2 ± {2 * SHARE_REACH:.1f})"
    )


def main() -> int:
    """Parses the command line, measures, shows and writes; returns the exit code."""
    parser = argparse.ArgumentParser(description="Show on SmolLM2 what tenants get of a busy engine.")
    parser.add_argument("--quick", action="store_true", help="a small run, to see whether it works")
    quick = parser.parse_args().quick
    try:
        document = run(QUICK if quick else Size())
    except (StackFailed, ClientError, serve.ServerError, httpx.HTTPError, grpc.RpcError) as failure:
        console.print(str(failure), style="red", markup=False, highlight=False)
        return 1
    show(document)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("fairness-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
