"""Load any OpenAI-style server and measure it: output tokens/s, time to the first token, time between tokens.

    python benchmarks/serve.py --url http://127.0.0.1:8000/v1 --api-key KEY --model smollm2
    python benchmarks/serve.py --url ... --model sql --model json --num-requests 200 --rate 4

Prompts are random words, the same for the same seed, each request its own unless --shared-prefix-tokens says
how much of it all have in common. Several models are taken in turn. Every request runs to --output-tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine

# Common English words: one token each in most vocabularies, so that a prompt's length is near from the start.
WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
"""
TIMEOUT_S = 600.0


class ServerError(Exception):
    """The server refused or broke off a request; the message says how."""


@dataclass(frozen=True)
class Load:
    """What to send. With a rate, requests arrive at random, so many a second; else as slots get free."""

    url: str
    models: tuple[str, ...]
    api_key: str = ""
    num_requests: int = 32
    concurrency: int = 16
    rate: float | None = None
    prompt_tokens: int = 128
    output_tokens: int = 64
    shared_prefix_tokens: int = 0
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request's body."""


@dataclass
class Timing:
    """One request as its client saw it, in seconds. `arrivals` are since the request was sent."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0]

    @property
    def per_token(self) -> float:
        """Mean time between this request's tokens after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.output_tokens - 1)


@dataclass(frozen=True)
class Result:
    """What a load yielded. Times in milliseconds; tokens as the server counted them."""

    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    ttft_ms: dict[str, float]
    inter_token_ms: dict[str, float]
    per_token_ms: float


class Client:
    """Sends completions to one server and times the answers."""

    def __init__(self, load: Load) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
        self._http = httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False)
        self._url = f"{load.url.rstrip('/')}/completions"
        self._fields = load.fields

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def complete(self, model: str, prompt: str, output_tokens: int) -> Timing:
        """Stream one completion. Raises ServerError."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        timing = Timing()
        started = time.perf_counter()
        async with self._http.stream("POST", self._url, json=body) as response:
            if not response.is_success:
                raise ServerError(
                    f"{response.status_code}: {(await response.aread()).decode(errors='replace')}"
                )
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(timing, json.loads(line[6:]), time.perf_counter() - started)
        if not timing.arrivals:
            raise ServerError("The server sent no token.")
        return timing


def _take(timing: Timing, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        raise ServerError(str(chunk["error"]))
    if chunk.get("choices") and chunk["choices"][0].get("text"):
        timing.arrivals.append(now)
    if usage := chunk.get("usage"):
        timing.prompt_tokens = usage["prompt_tokens"]
        timing.output_tokens = usage["completion_tokens"]


def make_prompts(load: Load, words_per_token: float) -> list[str]:
    """The prompts of a load: distinct random words, after a beginning that all share."""
    generator = random.Random(load.seed)

    def words(tokens: int) -> str:
        return " ".join(generator.choices(WORDS.split(), k=max(1, round(tokens * words_per_token))))

    prefix = words(load.shared_prefix_tokens) + " " if load.shared_prefix_tokens else ""
    own_tokens = load.prompt_tokens - load.shared_prefix_tokens
    return [prefix + words(own_tokens) for _ in range(load.num_requests)]


async def warm_up(client: Client, load: Load) -> float:
    """Touch each model once, so that its adapter is loaded, and learn how many words make a token."""
    # Words that no prompt of this or another seed begins with, lest it be found in the cache.
    generator = random.Random(f"warm-up {load.seed}")
    words = " ".join(generator.choices(WORDS.split(), k=load.prompt_tokens))
    timings = [await client.complete(model, words, 2) for model in load.models]
    return load.prompt_tokens / max(1, timings[0].prompt_tokens)


async def run(load: Load) -> Result:
    """Warm up, send a load and sum up. Raises ServerError, and httpx.HTTPError when the server is away."""
    async with Client(load) as client:
        prompts = make_prompts(load, await warm_up(client, load))
        started = time.perf_counter()
        timings = await _send(client, load, prompts)
        return summarise(timings, time.perf_counter() - started)


async def _send(client: Client, load: Load, prompts: Sequence[str]) -> list[Timing]:
    slots = asyncio.Semaphore(load.concurrency if load.rate is None else load.num_requests)
    generator = random.Random(load.seed)

    async def one(index: int, prompt: str) -> Timing:
        async with slots:
            return await client.complete(load.models[index % len(load.models)], prompt, load.output_tokens)

    sent: list[asyncio.Task[Timing]] = []
    for index, prompt in enumerate(prompts):
        sent.append(asyncio.create_task(one(index, prompt)))
        if load.rate is not None:
            await asyncio.sleep(generator.expovariate(load.rate))
    return await asyncio.gather(*sent)


def summarise(timings: Sequence[Timing], seconds: float) -> Result:
    """Percentiles over all requests, and over all gaps between two chunks of a stream."""
    gaps = np.concatenate([np.diff(timing.arrivals) for timing in timings])
    output_tokens = sum(timing.output_tokens for timing in timings)
    return Result(
        requests=len(timings),
        seconds=round(seconds, 3),
        prompt_tokens=sum(timing.prompt_tokens for timing in timings),
        output_tokens=output_tokens,
        output_tokens_per_second=round(output_tokens / seconds, 1),
        ttft_ms=_percentiles([timing.ttft for timing in timings]),
        inter_token_ms=_percentiles(gaps),
        per_token_ms=round(1000 * float(np.mean([timing.per_token for timing in timings])), 2),
    )


def _percentiles(seconds: Any) -> dict[str, float]:
    values = 1000 * np.asarray(seconds)
    if not values.size:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(float(values.max()), 2)}


def show(result: Result, console: Console) -> None:
    """Print a result as a short table."""
    table = Table(title=f"{result.requests} requests in {result.seconds:.1f} s", title_justify="left")
    for heading in ("output tokens/s", "TTFT p50 / p99, ms", "inter-token p50 / p99, ms", "prompt tokens"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{result.output_tokens_per_second:.1f}",
        f"{result.ttft_ms['p50']:.0f} / {result.ttft_ms['p99']:.0f}",
        f"{result.inter_token_ms['p50']:.1f} / {result.inter_token_ms['p99']:.1f}",
        f"{result.prompt_tokens / result.requests:.0f}",
    )
    console.print(table)


def parse_args() -> tuple[Load, int, Path | None]:
    """The load, the number of `--adapters`, and where to write JSON."""
    parser = argparse.ArgumentParser(description="Load an OpenAI-style server and measure it.")
    parser.add_argument("--url", required=True, help="base URL, ending in /v1")
    parser.add_argument("--api-key", default="", help="key to send")
    parser.add_argument(
        "--model", action="append", required=True, help="model to ask; repeatable, taken in turn"
    )
    parser.add_argument(
        "--adapters",
        type=int,
        default=0,
        metavar="N",
        help="ask MODEL-0 to MODEL-(N-1) in turn, in place of MODEL",
    )
    parser.add_argument("--num-requests", type=int, default=Load.num_requests)
    parser.add_argument(
        "--concurrency", type=int, default=Load.concurrency, help="requests under way at once"
    )
    parser.add_argument("--rate", type=float, help="requests a second, in place of --concurrency")
    parser.add_argument("--prompt-tokens", type=int, default=Load.prompt_tokens)
    parser.add_argument("--output-tokens", type=int, default=Load.output_tokens)
    parser.add_argument(
        "--shared-prefix-tokens", type=int, default=0, help="part of the prompt that all share"
    )
    parser.add_argument("--seed", type=int, default=Load.seed)
    parser.add_argument("--output", type=Path, help="file to write the result to, as JSON")
    given = vars(parser.parse_args())
    models, adapters, output = given.pop("model"), given.pop("adapters"), given.pop("output")
    if given["shared_prefix_tokens"] >= given["prompt_tokens"]:
        parser.error("--shared-prefix-tokens must be less than --prompt-tokens")
    return Load(models=tuple(models), **given), adapters, output


def main() -> int:
    """Parse the command line, run the load, show and write the result; returns the exit code."""
    load, adapters, output = parse_args()
    if adapters:
        load = replace(load, models=tuple(f"{load.models[0]}-{index}" for index in range(adapters)))
    console = Console()
    # The server's processes are not known here, so its work counts among the neighbours'.
    meter = machine.NeighbourMeter(lambda: [])
    try:
        result = asyncio.run(run(load))
    except (ServerError, httpx.HTTPError) as failure:
        console.print(f"error: {failure or type(failure).__name__}", style="red", markup=False)
        return 1
    show(result, console)
    if output is not None:
        document = {
            "load": {**asdict(load), "api_key": "" if not load.api_key else "..."},
            "result": asdict(result),
            "machine": machine.facts(),
            "load_average": meter.read().load_average,
        }
        output.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
