"""Time many adapters on SmolLM2: 2,000 registered, twice as many in use as there is room for, 10,000 loads.

    python benchmarks/adapters_many.py                              # twenty minutes and 14 GB of disk
    python benchmarks/adapters_many.py --adapters 300 --loads 1000 --requests 32 --rounds 3  # six minutes
    python benchmarks/adapters_many.py --kind qkvo --rounds 6       # the first question alone, of one kind
    python benchmarks/adapters_many.py --quick                      # whether it works, in three minutes

Starts the stack itself, on free ports and a temporary folder. Three questions:

- What does it cost that requests name any of 2,000 adapters, all alike or by Zipf's law, in place of 5? Asked
  of two kinds of rank 8. Those on q, k, v and o are of the kind with which S-LoRA (arXiv 2311.03285, table 3,
  setting S1) keeps 94.5 %, so they are what compares with it, though this model is small: one is 0.7 % of its
  weights, and of Llama-7B's 0.1 %. Those on all seven projections are what most people train now.
- How much longer does the median request wait for its first token when the adapters in use need twice the
  pages that there are?
- Does memory grow over loads and unloads?

Cases take turns in short rounds, and begin them in turn, so that a change of the machine's pace meets all
alike; read the ratios, each the median of those of single rounds, with the number of cores that others kept
busy beside them. Each kind has a stack of its own. What comes first is not counted: requests for many
adapters, until the engine's host memory is full of copies, as it is from then on.

Throughput is that of the time in which all slots are taken: from the first request's end to when the last one
is sent. Answers have lengths of their own, half to one and a half times the mean, so that the requests that
began together do not stay together. Writes JSON into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import httpx
from rich.console import Console
from rich.table import Table

from adapters.client import AdaptersClient, ClientError
from benchmarks import machine, serve
from benchmarks.random_adapters import ATTENTION, MODULES, draw, page_bytes, write_adapter
from benchmarks.stack import BASE, KV_BYTES, RESULTS
from examples.local_stack import LocalStack, Ports, StackFailed, free_ports, local_stack
from examples.smollm2 import gguf_file
from protos.engine_pb2 import LoadAdapterRequest, UnloadAdapterRequest
from protos.engine_pb2_grpc import EngineStub

RANK = 8
FEW = 5
ROOM = 8
THROUGHPUT_REACH = 0.95
TTFT_REACH = 3.0

console = Console()


@dataclass(frozen=True)
class Kind:
    """Adapters on the same projections, which are named after the kind."""

    name: str
    modules: tuple[str, ...]

    def adapter(self, index: int) -> str:
        """An adapter's name."""
        return f"{self.name}-{index}"


QKVO = Kind("qkvo", ATTENTION)
ALL = Kind("all", tuple(MODULES))


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    adapters: int = 2000
    requests: int = 52
    rounds: int = 4
    concurrency: int = 16
    prompt_tokens: int = 128
    output_tokens: int = 128
    loads: int = 10_000
    filling: int = 256
    """Requests that are not counted, each for the next adapter of a kind."""
    host_gib: int = 1
    """Of adapters' copies in the engine's host memory: 1 GiB has some 170 on all projections."""


QUICK = Size(adapters=40, requests=20, rounds=1, output_tokens=32, loads=200, filling=40)


@dataclass
class Case:
    """Requests for adapters drawn from so many, alike or by Zipf's law, and what came of them by round."""

    name: str
    kind: Kind
    adapters: int
    zipf: bool = False
    results: list[serve.Result] = field(default_factory=list)
    sustained: list[float] = field(default_factory=list)
    """Output tokens a second while all slots are taken."""
    busy_cores: list[float] = field(default_factory=list)

    def draw(self, count: int, seed: int) -> list[str]:
        """The adapters' names, one for each request."""
        return [self.kind.adapter(index) for index in draw(self.adapters, count, zipf=self.zipf, seed=seed)]


def upload_adapters(stack: LocalStack, key: str, kind: Kind, count: int) -> list[str]:
    """Makes adapters that differ in their weights, and uploads them. Returns their digests in hex."""
    digests = []
    with (
        tempfile.TemporaryDirectory(prefix="loraplex-adapters-") as root,
        AdaptersClient(stack.url, key) as client,
    ):
        for index in range(count):
            folder = Path(root) / kind.adapter(index)
            write_adapter(folder, rank=RANK, seed=index, modules=kind.modules)
            uploaded = client.upload(folder, kind.adapter(index), on_sent=lambda count: None)
            digests.append(uploaded["digest"])
            shutil.rmtree(folder)
            if (index + 1) % 100 == 0:
                console.print(f"uploaded {index + 1} adapters on {kind.name}")
    return digests


async def send(
    models: Sequence[str], size: Size, url: str, key: str, seed: int
) -> tuple[serve.Result, float]:
    """Sends a request to each model, as many at once as the size says. Returns the sums, and what was
    sustained.
    """
    load = serve.Load(
        url=url,
        models=(models[0],),
        api_key=key,
        num_requests=size.requests,
        prompt_tokens=size.prompt_tokens,
        output_tokens=size.output_tokens,
        seed=seed,
    )
    slots = asyncio.Semaphore(size.concurrency)
    async with serve.Client(load) as client:
        prompts = serve.make_prompts(load, await serve.warm_up(client, load))

        async def one(model: str, prompt: str, tokens: int) -> tuple[float, serve.Timing]:
            async with slots:
                sent = time.perf_counter()
                return sent, await client.complete(model, prompt, tokens)

        bounds = size.output_tokens // 2, size.output_tokens * 3 // 2
        lengths = [random.Random(index).randint(*bounds) for index in range(len(models))]  # as in all cases
        requests = zip(models, prompts, lengths, strict=True)
        started = time.perf_counter()
        answers = await asyncio.gather(*(one(*request) for request in requests))
        seconds = time.perf_counter() - started
        return serve.summarise([timing for _, timing in answers], seconds), sustained(answers)


def sustained(answers: Sequence[tuple[float, serve.Timing]]) -> float:
    """Output tokens a second from the first answer's end to when the last request was sent.

    Args:
        answers: when each was sent, and its times.
    """
    begin = min(sent + timing.arrivals[-1] for sent, timing in answers)
    end = max(sent for sent, _ in answers)
    tokens = 0.0
    for sent, timing in answers:
        pieces = sum(begin < sent + arrival <= end for arrival in timing.arrivals)
        tokens += pieces * timing.output_tokens / len(timing.arrivals)
    return round(tokens / (end - begin), 1)


def run_rounds(cases: Sequence[Case], size: Size, url: str, key: str) -> None:
    """All cases in turn, several times over. A seed must not return, or prompts would be found cached."""
    for round_number in range(size.rounds):
        for turn in range(len(cases)):
            number = (round_number + turn) % len(cases)
            case = cases[number]
            meter = machine.NeighbourMeter(lambda: machine.process_tree(os.getpid()))
            seed = 1 + round_number * len(cases) + number
            result, rate = asyncio.run(send(case.draw(size.requests, seed), size, url, key, seed))
            case.results.append(result)
            case.sustained.append(rate)
            case.busy_cores.append(meter.read().busy_cores)
            console.print(
                f"round {round_number + 1}, {case.name}: {rate} tokens/s, "
                f"first token {result.ttft_ms['p50']} ms, others {case.busy_cores[-1]} cores"
            )


def fill_host_memory(kind: Kind, size: Size, url: str, key: str) -> None:
    """Has short answers made with one adapter of a kind after the other."""
    models = [kind.adapter(index % size.adapters) for index in range(size.filling)]
    short = replace(size, requests=size.filling, output_tokens=2)
    asyncio.run(send(models, short, url, key, seed=0))


def load_and_unload(
    stack: LocalStack, ports: Ports, digests: Sequence[str], size: Size
) -> list[dict[str, Any]]:
    """Loads and unloads adapters one by one. Returns what the engine and the gateway took of memory."""
    samples = []
    with grpc.insecure_channel(f"127.0.0.1:{ports.engine}") as channel:
        stub = EngineStub(channel)
        for count in range(size.loads + 1):
            if count % max(1, size.loads // 10) == 0:
                samples.append({"loads": count, "resident_bytes": resident_memory(stack)})
                console.print(f"{count} loads: {samples[-1]['resident_bytes']}")
            digest = bytes.fromhex(digests[count % len(digests)])
            stub.LoadAdapter(LoadAdapterRequest(digest=digest))
            stub.UnloadAdapter(UnloadAdapterRequest(digest=digest))
    return samples


def resident_memory(stack: LocalStack) -> int:
    """Resident bytes of the stack's largest process, which is the engine."""
    return max(machine.memory(process) for process in machine.process_tree(stack.process.pid))


def cases_of(kind: Kind, size: Size) -> list[Case]:
    """What is asked of many adapters of a kind; the others are compared with the first."""
    return [
        Case(f"{FEW} on {kind.name}", kind, FEW),
        Case(f"{size.adapters} on {kind.name}, Zipf", kind, size.adapters, zipf=True),
        Case(f"{size.adapters} on {kind.name}, uniform", kind, size.adapters),
    ]


def run(size: Size, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Measures everything, and returns it as a JSON document. Raises StackFailed."""
    flags = ["--served-model-name", BASE, "--dtype", "bfloat16", "--kv-cache-memory-bytes", str(KV_BYTES)]
    flags += ["--lora-host-memory-bytes", f"{size.host_gib}GiB"]
    many: list[Case] = []
    samples: list[dict[str, Any]] = []
    for kind in kinds:
        cases, ports = cases_of(kind, size), free_ports()
        with local_stack(gguf_file(), ports, flags) as stack:
            key = stack.create_tenant("bench")
            digests = upload_adapters(stack, key, kind, size.adapters)
            fill_host_memory(kind, size, f"{stack.url}/v1", key)
            os.sync()  # else what the uploads wrote goes to the disk during the first rounds
            run_rounds(cases, size, f"{stack.url}/v1", key)
            if kind is ALL:
                samples = load_and_unload(stack, ports, digests, size)
        many += cases
    crowded = []
    if ALL in kinds:
        crowded = [Case(f"{count} in room for {ROOM}", ALL, count) for count in (ROOM, 2 * ROOM)]
        ports, room = free_ports(), ["--lora-memory-bytes", str(ROOM * page_bytes(2))]
        with local_stack(gguf_file(), ports, flags + room) as stack:
            key = stack.create_tenant("bench")
            upload_adapters(stack, key, ALL, 2 * ROOM)
            run_rounds(crowded, size, f"{stack.url}/v1", key)
    return {
        "machine": machine.facts(),
        "size": asdict(size),
        "rank": RANK,
        "many": [asdict(case) for case in many],
        "crowded": [asdict(case) for case in crowded],
        "memory": samples,
    }


def ratio(first: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds of a case's figure to the first case's of the same round."""
    return median(own / base for base, own in zip(first, other, strict=True))


def first_tokens(case: dict[str, Any]) -> list[float]:
    """A case's median times to the first token, by round."""
    return [result["ttft_ms"]["p50"] for result in case["results"]]


def add_rows(table: Table, cases: Sequence[dict[str, Any]], reach: str) -> None:
    """A row for each case, with its ratios to the first, and what those of the others are to reach."""
    for index, case in enumerate(cases):
        table.add_row(
            case["name"],
            f"{median(case['sustained']):.1f}",
            f"{ratio(cases[0]['sustained'], case['sustained']):.3f}",
            f"{median(first_tokens(case)):.0f}",
            f"{ratio(first_tokens(cases[0]), first_tokens(case)):.2f}",
            reach if index else "",
            f"{median(case['busy_cores']):.2f}",
        )


def show(document: dict[str, Any]) -> None:
    """Prints the figures beside those to reach."""
    facts = document["machine"]
    table = Table(title=f"{facts['cpu']}, {facts['cores']} cores", title_justify="left")
    table.add_column("case")
    for heading in ("tokens/s", "to the first", "TTFT, ms", "to the first", "reach", "others' cores"):
        table.add_column(heading, justify="right")
    for kind in (QKVO, ALL):
        cases = [case for case in document["many"] if case["kind"]["name"] == kind.name]
        add_rows(table, cases, f"tokens ≥ {THROUGHPUT_REACH}")
    add_rows(table, document["crowded"], f"TTFT ≤ {TTFT_REACH}")
    console.print(table)
    if not document["memory"]:
        return
    first, last = document["memory"][1], document["memory"][-1]
    grown = (last["resident_bytes"] - first["resident_bytes"]) / 1e6
    console.print(
        f"engine's memory from {first['loads']} to {last['loads']} loads and unloads: {grown:+.1f} MB"
    )


def main() -> int:
    """Parses the command line, measures, shows and writes; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time many adapters on SmolLM2.")
    parser.add_argument("--quick", action="store_true", help="a small run, to see whether it works")
    for name, meaning in (
        ("adapters", "registered"),
        ("requests", "in each round of a case"),
        ("rounds", "of all cases"),
        ("loads", "and unloads, one by one"),
        ("filling", "requests beforehand, each for the next adapter of a kind"),
        ("host-gib", "of host memory for adapters"),
    ):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS, help=meaning)
    parser.add_argument("--kind", choices=[QKVO.name, ALL.name], help="of adapters; otherwise both")
    given = vars(parser.parse_args())
    only = given.pop("kind")
    kinds = [kind for kind in (QKVO, ALL) if only in (None, kind.name)]
    try:
        document = run(replace(QUICK if given.pop("quick") else Size(), **given), kinds)
    except (StackFailed, ClientError, serve.ServerError, httpx.HTTPError, grpc.RpcError) as failure:
        console.print(str(failure), style="red", markup=False, highlight=False)
        return 1
    show(document)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("adapters-many-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
