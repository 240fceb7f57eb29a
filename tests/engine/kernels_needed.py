"""Which kernels a GPU engine compiles, and when, found without a GPU; see `test_kernels_needed`.

Everything is as on a GPU up to the launch of a kernel, where Triton is asked only which variant it would
compile. Run as a program of its own, since it makes torch's and Triton's view of the device another.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.gpu_decode import LLAMA_8B, RandomWeights
from engine.model.llama import LlamaModel
from engine.model.loading import LoadedModel
from engine.runner import Runner
from engine.step import PromptScoring, SamplingParams, StepAdapter, StepPlan, StepRow
from kernels.gpu import compile_ahead, launch

GPU, TARGET = torch.device("cuda:0"), GPUTarget("cuda", 90, 32)
MAX_MODEL_LEN, NUM_PAGES, WIDEST = 8192, 300, 4
CONFIG = replace(
    LLAMA_8B,
    num_layers=1,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=320,
    max_model_len=MAX_MODEL_LEN,
)
SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=2),
    SamplingParams(logit_bias=((5, 1.0),)),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5),
]


class Driver(compile_ahead._NoDevice):
    def get_current_stream(self, device: int) -> int:
        return 0


class Placed(TorchFunctionMode):
    """Tensors lie on the CPU and say that they are on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Each look-up of a getter makes another object, so these are compared by value.
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return GPU
        if func is torch.Tensor.pin_memory:
            return args[0]
        here = {"device": "cpu", "pin_memory": False}
        options = {name: here.get(name, value) for name, value in (kwargs or {}).items()}
        return func(*["cpu" if isinstance(arg, torch.device) else arg for arg in args], **options)


class Event:
    def __init__(self, **options: object) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream:
    device = GPU

    def __init__(self, *of: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass


class Graph:
    capturing = False

    def replay(self) -> None:
        pass

    @classmethod
    @contextmanager
    def capture(cls, graph: object, pool: object) -> Iterator[None]:
        cls.capturing = True
        yield
        cls.capturing = False


def pretend_there_is_a_gpu() -> None:
    driver.set_active(Driver(TARGET))  # type: ignore[arg-type]
    launch._dependent_launch = lambda device: True  # type: ignore[assignment]
    launch._processors = lambda device: 132  # type: ignore[assignment]
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": Graph.capture,
        "stream": lambda stream: nullcontext(),
        "current_stream": Stream,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (1 << 30, 1 << 31),
        "graph_pool_handle": lambda: None,
        "is_current_stream_capturing": lambda: Graph.capturing,
    }.items():
        setattr(torch.cuda, name, value)


def random_plan(rng: random.Random, max_num_seqs: int, max_tokens: int) -> StepPlan:
    """A step of any kind that requests may come to."""
    budget = min(max_tokens, rng.choice([1, 16, 32, 100, 256, 300, 512, 700, 2048, 3000, max_tokens]))
    num_adapters, has_vectors = rng.choice([0, 0, 1, 3, 40, 200]), rng.random() < 0.2
    adapters = [
        StepAdapter(1 + i, (i,) * (width + has_vectors), 16 * width, has_vectors=has_vectors)
        for i in range(num_adapters)
        for width in [rng.choice([1, WIDEST])]
    ]
    rows: list[StepRow] = []
    for seq_id in range(min(max_num_seqs, rng.choice([1, 2, 5, 40, max_num_seqs]))):
        count = min(budget, rng.choice([1, 1, 1, 7, 100, 600, max_tokens]))
        budget -= count
        if count == 0:
            break
        start = min(rng.choice([0, 0, 30, 500]), MAX_MODEL_LEN - count)
        row = StepRow(
            seq_id,
            [5] * count,
            start,
            range(-(-(start + count) // 16)),
            rng.choice([None, *adapters]),
            sampling=rng.choice(SAMPLING),
        )
        if count > 8 and rng.random() < 0.1:
            row = replace(row, scoring=PromptScoring(2, [5] * 4, 1))
        rows.append(row)
    return StepPlan(tuple(rows))


def started_runner(max_num_seqs: int, max_tokens: int, has_graphs: bool) -> Runner:
    """A runner of a small model that has done all that an engine does before it serves."""
    most = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_tokens}
    network = LlamaModel(CONFIG, RandomWeights(CONFIG), torch.bfloat16, GPU)
    model = LoadedModel(
        config=CONFIG, network=network, digest=bytes(32), tokenizer_files={}, dtype=torch.bfloat16, device=GPU
    )
    runner = Runner(
        model, num_blocks=MAX_MODEL_LEN // 16, num_rank_pages=NUM_PAGES, max_lora_rank=16 * WIDEST
    )
    runner.warm_up(**most)
    if has_graphs:
        runner.capture_graphs(**most)
        runner._graphs = None  # each step then shows what it needs itself
    return runner


def compiled() -> dict[str, object]:
    """Has all kernels compiled for a GPU of today, in the cache that the environment names."""
    with compile_ahead.collecting() as jobs, Placed():
        started_runner(256, 8192, has_graphs=True)
    compile_ahead.compile_all(list(jobs), target=TARGET)
    return {"jobs": len(jobs)}


def needed_late(seed: int, max_num_seqs: int, max_tokens: int, has_graphs: bool) -> dict[str, object]:
    """Which kernels random steps need that the start has not needed."""
    needed: set[tuple[str, str]] = set()

    def note(*, fn: Any, compile: Any, **_: object) -> bool:
        needed.add((fn.name, compile["specialization_data"]))
        return True

    knobs.runtime.jit_cache_hook = note  # type: ignore[assignment]
    with compile_ahead._Zeros(), Placed():
        runner = started_runner(max_num_seqs, max_tokens, has_graphs)
        at_start, rng = set(needed), random.Random(seed)
        for _ in range(200):
            runner.submit(random_plan(rng, max_num_seqs, max_tokens))
    late = {name for name, _ in needed - at_start}
    return {"kernels": sorted({name for name, _ in at_start}), "late": sorted(late)}


if __name__ == "__main__":
    pretend_there_is_a_gpu()
    if sys.argv[1] == "compile":
        print(json.dumps(compiled()))
    else:
        print(json.dumps(needed_late(*map(int, sys.argv[2:5]), has_graphs=sys.argv[1] == "graphs")))
