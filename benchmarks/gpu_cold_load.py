"""How long others wait for their tokens while a cold adapter comes from disk, on a GPU.

    python -m benchmarks.gpu_cold_load --out results.json

128 sequences decode at a context near 576 under 8 adapters, over random weights of Llama-3.1-8B's shape. Then
requests come one after another, each for an adapter that only the disk has: it is read, copied to the device
and its prompt computed, while the others go on. The gap between two tokens of a sequence is the
time from one step's news to the next's. Prompts are of 16 tokens, where the load shows, and of 512, which
take a while to compute whoever asks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Mapping
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu_decode import LLAMA_8B
from benchmarks.gpu_throughput import NUM_BLOCKS, Bench, preload
from engine.__main__ import SWITCH_INTERVAL_S
from engine.adapter_tiers import AdapterTiers
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.model.adapter_reading import read_adapter, reserve_host_memory
from engine.model.adapter_rehearsal import rehearse_packing
from engine.model.adapter_weights import HostAdapter
from engine.outputs import LinkOutput
from engine.rank_pages import RankPages
from engine.scheduler import Scheduler
from engine.scheduler.adapter_gate import AdapterGate

NUM_DECODING, PROMPT, OUTPUT = 128, 512, 600
COLD_PROMPTS = (16, 512)
NUM_WARM, NUM_COLD, STEPS_BETWEEN = 8, 4, 60
RANK = 16
RESERVED = 2 << 30
"""Bytes page-locked beforehand: more than all loads take, as long as an engine has some of its own left."""
COLD = b"cold"


def write_cold_adapter(folder: Path) -> None:
    """An adapter of all projections in PEFT's format, in bfloat16."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted(LLAMA_8B.modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(LLAMA_8B.num_layers):
        for module, (size, out) in LLAMA_8B.modules.items():
            parent = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            stem = f"base_model.model.model.layers.{layer}.{parent}.{module}"
            weights[f"{stem}.lora_A.weight"] = (torch.randn(RANK, size) / size**0.5).bfloat16()
            weights[f"{stem}.lora_B.weight"] = (torch.randn(out, RANK) * 0.02).bfloat16()
    save_file(weights, folder / "adapter_model.safetensors")


class _Watch:
    """The times of news, and of what the cold requests got."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.first_tokens: dict[int, float] = {}

    def deliver(self, outputs: Mapping[Hashable, LinkOutput]) -> None:
        now = time.perf_counter()
        for link, news in outputs.items():
            assert not any(finished.error for finished in news.finished), news.finished
            if link == COLD:
                for number in news.request_ids:
                    self.first_tokens.setdefault(number, now)
            elif news.tokens:
                self.times.append(now)


def measure(bench: Bench) -> dict[str, float]:
    """Milliseconds: the median gap and the longest; while cold adapters come, the longest, and the one that
    follows as many as there were loads; and the first token of those."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with tempfile.TemporaryDirectory() as folder:
        write_cold_adapter(Path(folder))
        return _measure(bench, Path(folder))


def _measure(bench: Bench, folder: Path) -> dict[str, float]:
    def read(digest: bytes) -> HostAdapter:
        if digest.startswith(COLD):
            return read_adapter(folder, bench.model.network, pin=True)
        return bench.adapter

    news = threading.Event()
    tiers = AdapterTiers(read, num_pages=64, host_bytes=1 << 40, wake=news.set)
    gate = AdapterGate(RankPages(64), tiers, bench.runner.write_adapter, bench.runner.drop_adapter)
    scheduler = Scheduler(bench.limits, BlockPool(NUM_BLOCKS, enable_prefix_caching=False), gate)
    loop = EngineLoop(scheduler, bench.runner, gate, news, overlap=True)
    rehearse_packing(bench.model.config, bench.model.dtype)
    reserve_host_memory(bench.model.network, nbytes=RESERVED, max_rank=RANK)
    warm = [b"warm-%d" % i for i in range(NUM_WARM)]
    preload(gate, warm)
    for i in range(NUM_DECODING):
        scheduler.add(bench.request(i, PROMPT, OUTPUT, warm[i % NUM_WARM]))
    while scheduler.num_waiting:
        loop.step(lambda outputs: None)
    for _ in range(STEPS_BETWEEN):
        loop.step(lambda outputs: None)  # until all of their prompts are computed
    quiet = _Watch()
    for _ in range(STEPS_BETWEEN):
        loop.step(quiet.deliver)
    figures = {"median_step": statistics.median(_gaps(quiet.times)), "longest": max(_gaps(quiet.times))}
    for length in COLD_PROMPTS:
        watch, firsts = _Watch(), []
        for _ in range(NUM_COLD):
            number = 1000 * length + len(firsts)
            begin = time.perf_counter()
            scheduler.add(bench.request(number, length, 4, COLD + b"%d" % number, link=COLD))
            while number not in watch.first_tokens:
                assert scheduler.num_running > NUM_DECODING // 2, "the others have ended meanwhile"
                loop.step(watch.deliver)
            firsts.append(1e3 * (watch.first_tokens[number] - begin))
        longest = sorted(_gaps(watch.times), reverse=True)
        figures[f"longest_while_loading_prompt_{length}"] = longest[0]
        figures[f"fifth_longest_while_loading_prompt_{length}"] = longest[NUM_COLD]
        figures[f"first_token_prompt_{length}"] = statistics.median(firsts)
    scheduler.abort_link("bench")
    while loop.step(lambda outputs: None):
        pass
    tiers.close()
    return figures


def _gaps(times: list[float]) -> list[float]:
    return [1e3 * (later - earlier) for earlier, later in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_cold_load.json"))
    options = parser.parse_args()
    figures = measure(Bench(8192))
    options.out.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
