"""What it costs to hold answers to a JSON schema: the same load free and held, on SmolLM2, round by round.

    python benchmarks/structured.py

Starts the stack itself, and keeps 32 requests running, which is what its batch holds. The schema cannot be
satisfied within the tokens of a request, so that every answer is held to its end. Writes JSON into
benchmarks/results/.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Any

import httpx
from openai import OpenAIError
from rich.console import Console

from benchmarks import machine, serve
from benchmarks.stack import BASE, KV_BYTES, RESULTS, answer_first_token
from examples.local_stack import StackFailed, free_ports, local_stack
from examples.smollm2 import gguf_file

BATCH = 32
ROUNDS = 5
REACH = 0.10
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "at": {"type": "string", "format": "date-time"},
    },
    "required": ["name", "age", "tags", "at"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}

console = Console()


def rates(url: str, key: str) -> dict[str, list[float]]:
    """Output tokens a second of each round, by arm. Arms take turns: the machine's load meets them alike."""
    free = serve.Load(url, (BASE,), key, num_requests=BATCH, concurrency=BATCH, prompt_tokens=32)
    arms = {"free": free, "held": replace(free, fields={"guided_json": SCHEMA})}
    found: dict[str, list[float]] = {name: [] for name in arms}
    seeds = count()  # never the same prompts again: they would be cached
    for number in range(ROUNDS + 1):
        for name, load in arms.items():
            result = asyncio.run(serve.run(replace(load, seed=next(seeds))))
            if number:  # the first warms up
                found[name].append(result.output_tokens_per_second)
    return found


def run() -> dict[str, Any]:
    """Start a stack, measure, and return it as a JSON document. Raises StackFailed."""
    flags = ["--served-model-name", BASE, "--kv-cache-memory-bytes", str(KV_BYTES)]
    flags += ["--max-num-seqs", str(BATCH)]
    with local_stack(gguf_file(), free_ports(), flags) as stack:
        key = stack.create_tenant("bench")
        answer_first_token(f"{stack.url}/v1", key)
        meter = machine.NeighbourMeter(lambda: machine.process_tree(os.getpid()))
        found = rates(f"{stack.url}/v1", key)
        busy = meter.read().busy_cores
    return {"machine": machine.facts(), "batch": BATCH, "tokens_per_second": found, "others_cores": busy}


def main() -> int:
    """Measure, show and write; returns the exit code."""
    try:
        document = run()
    except (StackFailed, OpenAIError, serve.ServerError, httpx.HTTPError) as failure:
        console.print(str(failure), style="red", markup=False, highlight=False)
        return 1
    free, held = (median(document["tokens_per_second"][arm]) for arm in ("free", "held"))
    document["cost"] = round(free / held - 1, 4)
    console.print(
        f"free {free:.1f} tok/s, held {held:.1f}: {document['cost']:+.1%} a token (reach: {REACH:.0%})"
    )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("structured-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
