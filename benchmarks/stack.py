"""Time the whole stack on SmolLM2: base, 1, 4 and 16 adapters, one request alone, a shared prefix, the start.

    python benchmarks/stack.py                       # or: make bench
    python benchmarks/stack.py -- --dtype float32    # flags for the engine

Starts the stack itself, on free ports and a temporary folder. Each figure is the median of several rounds, in
which the cases take turns, and stands beside the figure to reach and the number of cores that others kept
busy: with neighbours, read the ratios. Writes JSON into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.table import Table

from adapters.client import AdaptersClient, ClientError
from benchmarks import machine, serve
from benchmarks.random_adapters import write_adapter
from examples.local_stack import LocalStack, StackFailed, free_ports, local_stack
from examples.smollm2 import gguf_file

RESULTS = Path(__file__).resolve().parent / "results"
BASE = "smollm2"
RANK = 16
ADAPTERS = tuple(f"adapter-{index}" for index in range(16))
ROUNDS = 3
KV_BYTES = 256 << 20
FIRST_TOKEN_REACH_S = 10
ENGINE_MEMORY_REACH_GB = 1.5

console = Console()


def rate(result: serve.Result) -> float:
    """Output tokens a second."""
    return result.output_tokens_per_second


def per_token(result: serve.Result) -> float:
    """Milliseconds between a request's tokens."""
    return result.per_token_ms


def first_token(result: serve.Result) -> float:
    """Milliseconds to the first token, of the median request."""
    return result.ttft_ms["p50"]


@dataclass(frozen=True)
class Case:
    """One row of the table: a load, which of its figures counts, and the figure to reach."""

    name: str
    models: tuple[str, ...]
    figure: Callable[[serve.Result], float]
    unit: str
    reach: str
    sizes: dict[str, Any] = field(default_factory=dict)


ALONE = {"num_requests": 2, "concurrency": 1}
SHARED_PREFIX = {
    "num_requests": 16,
    "prompt_tokens": 528,
    "shared_prefix_tokens": 512,
    "output_tokens": 8,
}
CASES = (
    Case("base", (BASE,), rate, "tokens/s", "≥ 250"),
    Case("1 adapter", ADAPTERS[:1], rate, "tokens/s", "≥ 220"),
    Case("4 adapters", ADAPTERS[:4], rate, "tokens/s", "≥ 210"),
    Case("16 adapters", ADAPTERS, rate, "tokens/s", "≥ 190"),
    Case("alone, base", (BASE,), per_token, "ms a token", "≤ 25", ALONE),
    Case("alone, adapter", ADAPTERS[:1], per_token, "ms a token", "≤ 30", ALONE),
    Case("512 shared, base", (BASE,), first_token, "ms TTFT", "≤ 300", SHARED_PREFIX),
    Case("512 shared, adapter", ADAPTERS[:1], first_token, "ms TTFT", "≤ 300", SHARED_PREFIX),
)


@dataclass
class Samples:
    """What the rounds of one case yielded: the figure, cores kept busy by others, and all the rest."""

    figures: list[float] = field(default_factory=list)
    busy_cores: list[float] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)


def measure(case: Case, url: str, key: str, seed: int) -> tuple[serve.Result, machine.Neighbours]:
    """Run one case once. A seed must not return, or prompts would be found in the prefix cache."""
    load = serve.Load(url=url, models=case.models, api_key=key, seed=seed, **case.sizes)
    if load.shared_prefix_tokens:
        asyncio.run(compute_prefix(load))
    meter = machine.NeighbourMeter(lambda: machine.process_tree(os.getpid()))
    result = asyncio.run(serve.run(load))
    return result, meter.read()


async def compute_prefix(load: serve.Load) -> None:
    """Send a load's first prompt alone, so that its beginning is in the cache."""
    async with serve.Client(load) as client:
        prompts = serve.make_prompts(load, await serve.warm_up(client, load))
        await client.complete(load.models[0], prompts[0], 1)


def run_rounds(url: str, key: str) -> dict[str, Samples]:
    """All cases in turn, several times over, so that a change of the machine's load meets all alike."""
    samples = {case.name: Samples() for case in CASES}
    for round_number in range(ROUNDS):
        for number, case in enumerate(CASES):
            console.print(f"round {round_number + 1} of {ROUNDS}: {case.name}")
            result, neighbours = measure(case, url, key, seed=1 + round_number * len(CASES) + number)
            samples[case.name].figures.append(case.figure(result))
            samples[case.name].busy_cores.append(neighbours.busy_cores)
            samples[case.name].results.append(asdict(result) | asdict(neighbours))
    return samples


def answer_first_token(url: str, key: str) -> None:
    """Have the base model make one token."""
    with OpenAI(base_url=url, api_key=key) as client:
        client.completions.create(model=BASE, prompt="Hello", max_tokens=1)


def upload_adapters(stack: LocalStack, key: str) -> None:
    """Make the random adapters and upload them all."""
    with (
        tempfile.TemporaryDirectory(prefix="loraplex-adapters-") as folder,
        AdaptersClient(stack.url, key) as client,
    ):
        for seed, name in enumerate(ADAPTERS):
            write_adapter(Path(folder) / name, rank=RANK, seed=seed)
            client.upload(Path(folder) / name, name, on_sent=lambda count: None)


def engine_peak_memory(stack: LocalStack) -> int:
    """The most resident memory that the stack's largest process has had, which is the engine, in bytes."""
    return max(machine.peak_memory(process) for process in machine.process_tree(stack.process.pid))


def run(engine_args: Sequence[str]) -> dict[str, Any]:
    """Start a stack, measure everything, and return it as a JSON document. Raises StackFailed."""
    flags = ["--served-model-name", BASE, "--kv-cache-memory-bytes", str(KV_BYTES), *engine_args]
    load_average = os.getloadavg()[0]
    started = time.monotonic()
    with local_stack(gguf_file(), free_ports(), flags) as stack:
        ready_s = time.monotonic() - started
        key = stack.create_tenant("bench")
        asked = time.monotonic()
        answer_first_token(f"{stack.url}/v1", key)
        first_token_s = ready_s + time.monotonic() - asked
        upload_adapters(stack, key)
        samples = run_rounds(f"{stack.url}/v1", key)
        peak = engine_peak_memory(stack)
    return {
        "machine": machine.facts(),
        "engine_args": list(engine_args),
        "load_average_at_start": round(load_average, 2),
        "first_token_s": round(first_token_s, 2),
        "engine_peak_bytes": peak,
        "kv_cache_bytes": KV_BYTES,
        "cases": {name: asdict(each) for name, each in samples.items()},
    }


def show(document: dict[str, Any]) -> None:
    """Print the figures beside those to reach."""
    table = Table(
        title=f"{document['machine']['cpu']}, {document['machine']['cores']} cores", title_justify="left"
    )
    table.add_column("case")
    for heading in ("median", "best", "reach", "unit", "to base", "others' cores"):
        table.add_column(heading, justify="right")
    base = median(document["cases"]["base"]["figures"])
    for case in CASES:
        figures = document["cases"][case.name]["figures"]
        best = max(figures) if case.reach.startswith("≥") else min(figures)
        ratio = f"{median(figures) / base:.2f}" if case.figure is rate else ""
        busy = f"{median(document['cases'][case.name]['busy_cores']):.2f}"
        table.add_row(case.name, f"{median(figures):.1f}", f"{best:.1f}", case.reach, case.unit, ratio, busy)
    first = f"{document['first_token_s']:.1f}"
    table.add_row("first token", first, "", f"≤ {FIRST_TOKEN_REACH_S}", "s", "", "")
    memory = f"{(document['engine_peak_bytes'] - document['kv_cache_bytes']) / 1e9:.2f}"
    table.add_row("peak memory beside KV", memory, "", f"≤ {ENGINE_MEMORY_REACH_GB}", "GB", "", "")
    console.print(table)


def main() -> int:
    """Parse the command line, measure, show and write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time the whole stack on SmolLM2.")
    parser.add_argument("engine_args", nargs="*", metavar="-- ENGINE FLAGS", help="flags for the engine")
    arguments = parser.parse_args()
    try:
        document = run(arguments.engine_args)
    except (StackFailed, ClientError, OpenAIError, serve.ServerError, httpx.HTTPError) as failure:
        console.print(str(failure), style="red", markup=False, highlight=False)
        return 1
    show(document)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("stack-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
