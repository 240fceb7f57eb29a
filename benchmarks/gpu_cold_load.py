"""How long others wait for their tokens while a cold adapter comes from disk, on a GPU.

    python -m benchmarks.gpu_cold_load --out results.json

128 sequences decode at a context near 576, over random weights of Llama-3.1-8B's shape. Then requests come
one after another, each for an adapter that only the disk has: it is read, copied to the device and its prompt
computed, while the others go on. The gap between two tokens of a sequence is the time from one step's news to
the next's. First beside rows of the base model, where the first load is the first of the process; then beside
rows of 8 adapters, with prompts of 16 tokens, where the load shows, and of 512, which take a while to compute
whoever asks.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu_decode import LLAMA_8B
from benchmarks.gpu_throughput import NUM_BLOCKS, Bench, preload
from engine.adapter_tiers import AdapterTiers
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.model.adapter_reading import read_adapter
from engine.model.adapter_rehearsal import prepare_loads
from engine.model.adapter_weights import HostAdapter
from engine.outputs import LinkOutput
from engine.rank_pages import RankPages
from engine.scheduler import Scheduler
from engine.scheduler.adapter_gate import AdapterGate

NUM_DECODING, PROMPT, OUTPUT = 128, 512, 600
COLD_PROMPTS = (16, 512)
NUM_WARM, NUM_COLD, STEPS_BETWEEN = 8, 4, 60
RANK = 16
RESERVED = 8 << 30
"""Bytes page-locked beforehand, as an engine does."""
COLD = b"cold"


def write_cold_adapter(
    folder: Path, *, rank: int = RANK, projections: Collection[str] = LLAMA_8B.modules
) -> None:
    """An adapter of some projections in PEFT's format, in bfloat16."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(projections),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(LLAMA_8B.num_layers):
        for module in projections:
            size, out = LLAMA_8B.modules[module]
            parent = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            stem = f"base_model.model.model.layers.{layer}.{parent}.{module}"
            weights[f"{stem}.lora_A.weight"] = (torch.randn(rank, size) / size**0.5).bfloat16()
            weights[f"{stem}.lora_B.weight"] = (torch.randn(out, rank) * 0.02).bfloat16()
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
    """Milliseconds, by what is measured. The bench must not have written an adapter to the device yet."""
    with tempfile.TemporaryDirectory() as folder:
        write_cold_adapter(Path(folder))
        network = bench.model.network
        begin = time.perf_counter()
        prepare_loads(network, bench.runner.write_adapter, host_bytes=RESERVED, max_rank=RANK)
        torch.cuda.synchronize()
        prepared = {"ready_loads_s": time.perf_counter() - begin}
        gc.collect()
        gc.freeze()  # as an engine does before it serves
        return {**prepared, **_first_load(bench, Path(folder)), **_later_loads(bench, Path(folder))}


class _Stage:
    """Sequences that decode, of some adapters or of the base, and cold adapters that come beside them."""

    def __init__(self, bench: Bench, folder: Path, warm: Sequence[bytes]) -> None:
        def read(digest: bytes) -> HostAdapter:
            if digest.startswith(COLD):
                return read_adapter(folder, bench.model.network, pin=True)
            return bench.adapter

        news = threading.Event()
        self._bench = bench
        self._tiers = AdapterTiers(read, num_pages=64, host_bytes=1 << 40, wake=news.set)
        gate = AdapterGate(RankPages(64), self._tiers, bench.runner.write_adapter, bench.runner.drop_adapter)
        self._scheduler = Scheduler(bench.limits, BlockPool(NUM_BLOCKS, enable_prefix_caching=False), gate)
        self._loop = EngineLoop(self._scheduler, bench.runner, gate, news, overlap=True)
        self._num_cold = 0
        preload(gate, warm)
        for i in range(NUM_DECODING):
            self._scheduler.add(bench.request(i, PROMPT, OUTPUT, warm[i % len(warm)]))
        while self._scheduler.num_waiting:
            self._loop.step(lambda outputs: None)
        self.decode()  # until all of their prompts are computed

    def decode(self) -> _Watch:
        """Some steps with nothing beside them."""
        watch = _Watch()
        for _ in range(STEPS_BETWEEN):
            self._loop.step(watch.deliver)
        return watch

    def load(self, watch: _Watch, prompt: int) -> float:
        """Steps until a request for a cold adapter has its first token; returns after how long it has."""
        self._num_cold += 1
        number = NUM_DECODING + self._num_cold
        begin = time.perf_counter()
        digest = COLD + b"%d" % number
        self._scheduler.add(self._bench.request(number, prompt, 4, digest, link=COLD))
        while number not in watch.first_tokens:
            assert self._scheduler.num_running > NUM_DECODING // 2, "the others have ended meanwhile"
            self._loop.step(watch.deliver)
        return 1e3 * (watch.first_tokens[number] - begin)

    def close(self) -> None:
        self._scheduler.abort_link("bench")
        self._scheduler.abort_link(COLD)
        while self._loop.step(lambda outputs: None):
            pass
        self._tiers.close()


def _first_load(bench: Bench, folder: Path) -> dict[str, float]:
    """The median gap beside rows of the base model; and the longest while the first adapter of the process
    comes, and while its second does."""
    stage = _Stage(bench, folder, [b""])
    figures = {"base_median_step": statistics.median(_gaps(stage.decode().times))}
    for which in ("first", "second"):
        watch = _Watch()
        figures[f"{which}_adapter_first_token"] = stage.load(watch, COLD_PROMPTS[0])
        figures[f"longest_while_loading_{which}_adapter"] = max(_gaps(watch.times))
        stage.decode()
    stage.close()
    return figures


def _later_loads(bench: Bench, folder: Path) -> dict[str, float]:
    """The median gap beside rows of adapters, and the longest; while cold adapters come, the longest, and the
    one that follows as many as there were loads; and the first token of those."""
    stage = _Stage(bench, folder, [b"warm-%d" % i for i in range(NUM_WARM)])
    quiet = _gaps(stage.decode().times)
    figures = {"median_step": statistics.median(quiet), "longest": max(quiet)}
    for length in COLD_PROMPTS:
        watch = _Watch()
        firsts = [stage.load(watch, length) for _ in range(NUM_COLD)]
        longest = sorted(_gaps(watch.times), reverse=True)
        figures[f"longest_while_loading_prompt_{length}"] = longest[0]
        figures[f"fifth_longest_while_loading_prompt_{length}"] = longest[NUM_COLD]
        figures[f"first_token_prompt_{length}"] = statistics.median(firsts)
    stage.close()
    return figures


def _gaps(times: list[float]) -> list[float]:
    return [1e3 * (later - earlier) for earlier, later in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_cold_load.json"))
    options = parser.parse_args()
    bench = Bench(8192)
    ready = {f"ready_{part}_s": seconds for part, seconds in bench.seconds.items()}
    print(json.dumps(ready), flush=True)
    figures = {**measure(bench), **ready}
    options.out.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
