"""One decode step of the engine's own model on a GPU: random weights of Llama-3.1-8B's shape, many adapters.

    python -m benchmarks.gpu_decode --out results.json

Times the forward pass, logits and greedy sampling, eager and as a replayed CUDA graph, at a context of 576
tokens. Beside each: the floor that its bytes (weights, keys and values, distinct adapters) set at the copy
bandwidth of the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from benchmarks.gpu_checks import sampling_batch
from benchmarks.gpu_timing import capture, copy_bandwidth, replay_ms
from engine.batch import build_forward_batch
from engine.kv_cache import KVCache
from engine.model.config import ModelConfig, RopeConfig
from engine.model.llama import ForwardBatch, LlamaModel
from engine.model.lora_pool import RankPagePool
from engine.step import SamplingParams, StepAdapter, StepRow
from kernels.plans import BLOCK_SIZE
from kernels.sampling import sample

CONTEXT, RANK, BYTES = 576, 16, 2
CASES = [(rows, count) for count in (0, 1, 8, 32, 64) for rows in (1, 32, 128, 256) if count <= max(rows, 1)]
LLAMA_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(128001,),
)


class RandomWeights:
    """A ``WeightSource`` that draws each tensor on the device when asked."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def has(self, name: str) -> bool:
        return True

    def get(self, name: str) -> torch.Tensor:
        config = self._config
        if name.endswith("norm.weight"):
            return torch.ones(config.hidden_size, dtype=torch.bfloat16, device="cuda")
        module = name.split(".")[-2]
        size, out = config.modules.get(module, (config.hidden_size, config.vocab_size))
        return torch.randn(out, size, dtype=torch.bfloat16, device="cuda") / size**0.5


def decode_batch(num_rows: int, num_adapters: int) -> ForwardBatch:
    """Row i decodes its 576th token, under adapter i modulo the number; each has blocks of its own."""
    width = -(-CONTEXT // BLOCK_SIZE)
    rows = []
    for i in range(num_rows):
        adapter = None
        if num_adapters:
            n = i % num_adapters
            adapter = StepAdapter(adapter_id=n + 1, pages=(n,), rank=RANK)
        blocks = range(i * width, (i + 1) * width)
        rows.append(StepRow(i, [i + 1], CONTEXT - 1, blocks, adapter, sampling=SamplingParams()))
    return build_forward_batch(rows, torch.device("cuda"))


class Bench:
    """The model, its cache and its adapters."""

    def __init__(self, config: ModelConfig, max_rows: int, num_pages: int) -> None:
        device = torch.device("cuda")
        self.network = LlamaModel(config, RandomWeights(config), torch.bfloat16, device)
        self.cache = KVCache(config, max_rows * -(-CONTEXT // BLOCK_SIZE), torch.bfloat16, device)
        self.cache.data.normal_()
        self.adapters = RankPagePool(config, num_pages, torch.bfloat16, device)
        for layer in self.adapters.layers:
            for pool in layer:
                pool.a.normal_(std=pool.a.shape[3] ** -0.5)
                pool.b.normal_(std=0.02)
                pool.scales.fill_(1.0)

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self.network.logits(self.network.forward(batch, self.cache, self.adapters))
        return sample(logits, self.greedy).tokens

    @torch.inference_mode()
    def measure(self, num_rows: int, num_adapters: int) -> dict[str, float]:
        """Milliseconds: eager (host included, with its launches) and replayed."""
        batch = decode_batch(num_rows, num_adapters)
        self.greedy = sampling_batch(num_rows, temperature=0.0)
        graph = capture(lambda: self.step(batch))
        eager = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.step(batch)
            end.record()
            end.synchronize()
            eager.append(start.elapsed_time(end))
        return {"graph": replay_ms(graph, repeats=15), "eager": statistics.median(eager)}


def floor_ms(config: ModelConfig, num_rows: int, num_adapters: int, bandwidth: float) -> float:
    """The bytes of a step over the bandwidth (below some 184 rows nothing else binds)."""
    layer = sum(size * out for size, out in config.modules.values())
    adapter = RANK * sum(size + out for size, out in config.modules.values())
    weights = config.num_layers * (layer + num_adapters * adapter) + config.hidden_size * config.vocab_size
    kv = num_rows * CONTEXT * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return (weights + kv) * BYTES / bandwidth / 1e9


def profile(bench: Bench, num_rows: int, num_adapters: int) -> dict[str, float]:
    """Milliseconds of one eager step by kernel, the largest first."""
    batch = decode_batch(num_rows, num_adapters)
    bench.greedy = sampling_batch(num_rows, temperature=0.0)
    with (
        torch.inference_mode(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler,
    ):
        bench.step(batch)
        torch.cuda.synchronize()
    times = {event.key[:60]: event.self_device_time_total / 1e3 for event in profiler.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1])[:14])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_decode.json"))
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth:.2f} TB/s")
    bench = Bench(LLAMA_8B, max_rows=256, num_pages=64)
    report: dict = {"device": torch.cuda.get_device_name(), "copy_tb_s": bandwidth, "steps": []}
    print(f"a decode step at context {CONTEXT}, milliseconds")
    print(f"{'adapters':>8} {'rows':>5} {'floor':>7} {'graph':>7} {'eager':>7}")
    for num_rows, num_adapters in CASES:
        floor = floor_ms(LLAMA_8B, num_rows, num_adapters, bandwidth)
        times = bench.measure(num_rows, num_adapters)
        report["steps"].append({"rows": num_rows, "adapters": num_adapters, "floor": floor, **times})
        print(
            f"{num_adapters:8} {num_rows:5} {floor:7.2f} {times['graph']:7.2f} {times['eager']:7.2f}",
            flush=True,
        )
        options.out.write_text(json.dumps(report, indent=1))
    report["profile"] = profile(bench, 128, 32)
    for name, ms in report["profile"].items():
        print(f"{ms:8.3f} ms  {name}")
    options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
