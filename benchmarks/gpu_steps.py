"""Steps that are not plain decode steps, on a GPU: prompts beside decodes; what sampling and grammars add.

    python -m benchmarks.gpu_steps --out results.json

Random weights of Llama-3.1-8B's shape, 8 adapters of rank 16. A mixed step's time is its graph's: some
sequences decode at a context of 576, the rest of its tokens are prompts of up to 512 under one more adapter.
With sampling, steps are timed as the loop sees them, at a context near 256; a grammar is one that allows
every second token, so that its own work does not count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu_checks import sampling_batch
from benchmarks.gpu_decode import CONTEXT, LLAMA_8B
from benchmarks.gpu_throughput import Bench, Case, GraphTimes
from benchmarks.gpu_timing import time_ms
from engine.constraints import Grammar
from engine.sequence import Request
from engine.step import SamplingParams, StepAdapter, StepPlan, StepRow
from kernels.plans import BLOCK_SIZE
from kernels.sampling import sample
from kernels.sampling_batch import AllowedTokens

MIXED = {
    0: (16, 64, 128, 256, 512, 1024, 2048),
    28: (64, 128, 192, 256, 384, 512, 1024, 2048),
    128: (144, 192, 256, 384, 640),
}
"""Tokens of a step, by how many sequences decode in it."""
NUM_ADAPTERS, PROMPT, REPEATS = 7, 512, 12
SAMPLED_PROMPT, SAMPLED_OUTPUT = 232, 48
SAMPLING = {
    "greedy": SamplingParams(),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "logit_bias": SamplingParams(logit_bias=((5, 1.0), (7, 2.0))),
    "frequency_penalty": SamplingParams(frequency_penalty=0.5),
    "repetition_penalty": SamplingParams(repetition_penalty=1.2),
}


def mixed_plan(num_tokens: int, num_decodes: int) -> StepPlan:
    """Decodes under adapters in turn, then prompts under one more."""
    width = -(-CONTEXT // BLOCK_SIZE)
    adapters = [StepAdapter(n + 1, (n,), 16) for n in range(NUM_ADAPTERS + 1)]

    def row(seq: int, tokens: Sequence[int], start: int, adapter: StepAdapter) -> StepRow:
        blocks = range(seq * width, (seq + 1) * width)
        return StepRow(seq, tokens, start, blocks, adapter, sampling=SamplingParams())

    rows = [row(i, [i + 1], CONTEXT - 1, adapters[i % NUM_ADAPTERS]) for i in range(num_decodes)]
    for first in range(0, num_tokens - num_decodes, PROMPT):
        count = min(PROMPT, num_tokens - num_decodes - first)
        rows.append(row(len(rows), range(7, 7 + count), 0, adapters[-1]))
    return StepPlan(tuple(rows))


def mixed_table(bench: Bench) -> dict[str, float]:
    """Milliseconds of the graphs, by tokens and decodes."""
    for page in range(NUM_ADAPTERS + 1):
        bench.runner.write_adapter((page,), bench.adapter)
    report = {}
    for num_decodes, sizes in MIXED.items():
        for num_tokens in sizes:
            plan, times = mixed_plan(num_tokens, num_decodes), GraphTimes()
            with times.watch():
                for _ in range(REPEATS):
                    bench.runner.execute(plan)
            report[f"{num_tokens} tokens, {num_decodes} decodes"] = times.median_ms()
    return report


class EverySecond:
    """A grammar and its state: every second token may come, always."""

    num_words = -(-LLAMA_8B.vocab_size // 32)
    is_complete = False
    fault = ""

    def start(self, output: object = ()) -> EverySecond:
        return self

    def take(self, token: int) -> None:
        pass

    def write_allowed(self, words: np.ndarray) -> None:
        words[:] = 0x55555555


@contextmanager
def requests_with(bench: Bench, params: SamplingParams, grammar: Grammar | None) -> Iterator[None]:
    """The bench asks for these instead of greedy tokens."""
    ask = bench.request

    def request(*args: Any, **options: Any) -> Request:
        return replace(ask(*args, **options), sampling=(params,), grammar=grammar)

    bench.request = request
    try:
        yield
    finally:
        bench.request = ask


def sampling_table(bench: Bench) -> dict[str, float]:
    """Milliseconds of a step in the loop."""
    report = {}
    grammar = cast(Grammar, EverySecond())
    cases = [(f"{name}, 256 rows", 256, params, None) for name, params in SAMPLING.items()]
    cases += [("greedy, 32 rows", 32, SamplingParams(), None)]
    cases += [(f"grammar, {rows} rows", rows, SamplingParams(), grammar) for rows in (32, 256)]
    for name, rows, params, held_to in cases:
        with requests_with(bench, params, held_to):
            _, runner = bench.serve(rows, SAMPLED_PROMPT, SAMPLED_OUTPUT, Case(8, 64))
        report[name] = runner.step_ms(rows)[f"step_{rows}"]
    return report


def grammar_kernel_table() -> dict[str, float]:
    """Milliseconds of the draw alone, free and from every second token."""
    report = {}
    for rows in (32, 256):
        logits = torch.randn(rows, LLAMA_8B.vocab_size, dtype=torch.bfloat16, device="cuda")
        bits = torch.full((rows, EverySecond.num_words), 0x55555555, dtype=torch.int32, device="cuda")
        lists = torch.arange(rows, dtype=torch.int32, device="cuda")
        free = sampling_batch(rows, temperature=0.0)
        report[f"free, {rows} rows"] = time_ms(partial(sample, logits, free))
        held = replace(free, allowed=AllowedTokens(lists, bits))
        report[f"grammar, {rows} rows"] = time_ms(partial(sample, logits, held))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_steps.json"))
    options = parser.parse_args()
    bench = Bench(8192)
    report = {"device": torch.cuda.get_device_name(), "mixed": mixed_table(bench)}
    report["sampling"], report["draw"] = sampling_table(bench), grammar_kernel_table()
    options.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
