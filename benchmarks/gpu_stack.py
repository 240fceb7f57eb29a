"""The whole stack on a GPU, through its HTTP API: gateway, engine process, Valkey, and clients that stream.

    python -m benchmarks.gpu_stack --out results.json

`loraplex up` serves random weights of Llama-3.1-8B's shape in bfloat16, from files, and 64 adapters of rank
16 on all seven projections, uploaded like anybody's. The work is that of `gpu_throughput.py`, which has
neither processes nor HTTP: 256 chats of 512 distinct prompt tokens and 128 greedy output tokens, all at once;
then fewer, for the time between tokens. Clients are one more process on the machine, which reads the streams
and counts what comes. Everything is on: keys, the ledger, metrics, prefix caching.

The model's tokenizer is made up: bytes in, and a word of its own for every token that comes out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import string
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import uvloop
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from adapters.client import AdaptersClient
from benchmarks import machine
from benchmarks.gateway_overhead import chat, http_request
from benchmarks.gpu_cold_load import write_cold_adapter
from benchmarks.gpu_decode import LLAMA_8B
from benchmarks.raw_streams import StreamResult, run_streams
from engine.model.config import ModelConfig
from examples.local_stack import LocalStack, free_ports, local_stack

MODEL = "llama"
PROMPT, OUTPUT = 512, 128
NUM_TENANTS, NUM_ADAPTERS, NUM_FILES = 4, 64, 8
"""Adapters differ in their scale; so many have weights of their own."""
UPLOADS_AT_ONCE = 4
"""As many as a tenant may have."""
LORA_MEMORY = 6 << 30
LAYERS_A_FILE = 8
FOLDER = Path("/dev/shm")
"""Where model and adapters are written: a file system in memory."""


@dataclass(frozen=True, slots=True)
class Case:
    """So many chats at once, under so many adapters, of so many tenants in turn."""

    streams: int
    adapters: int = 0
    tenants: int = 1


CASES = {
    "256, base": Case(256),
    "256, 64 adapters": Case(256, NUM_ADAPTERS),
    "256, 64 adapters of 4 tenants": Case(256, NUM_ADAPTERS, NUM_TENANTS),
    "128, 64 adapters": Case(128, NUM_ADAPTERS),
    "32, 32 adapters": Case(32, 32),
    "1, base": Case(1),
    "1, 1 adapter": Case(1, 1),
}


def write_model(folder: Path, config: ModelConfig, device: str) -> None:
    """A folder as transformers would write it: random weights in files of some layers, and a tokenizer."""
    folder.mkdir()
    layer = {f"{_parent(name)}.{name}.weight": shape[::-1] for name, shape in config.modules.items()}
    norm = (config.hidden_size,)
    layer |= {"input_layernorm.weight": norm, "post_attention_layernorm.weight": norm}
    shapes = {
        f"model.layers.{number}.{name}": shape
        for number in range(config.num_layers)
        for name, shape in layer.items()
    }
    table = (config.vocab_size, config.hidden_size)
    ends = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": norm}
    files = [list(ends)]
    for first in range(0, config.num_layers, LAYERS_A_FILE):
        numbers = range(first, min(first + LAYERS_A_FILE, config.num_layers))
        files.append([f"model.layers.{number}.{name}" for number in numbers for name in layer])
    shapes |= ends

    def write(number: int) -> None:
        weights = {name: _random(shapes[name], device) for name in files[number]}
        save_file(weights, folder / f"model-{number}.safetensors", metadata={"format": "pt"})

    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(write, range(len(files))))
    weight_map = {name: f"model-{number}.safetensors" for number, names in enumerate(files) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(_hf_config(config)))
    _tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def _parent(module: str) -> str:
    return "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def _random(shape: tuple[int, ...], device: str) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, dtype=torch.bfloat16, device=device) / shape[1] ** 0.5).cpu()


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "bfloat16",
    }


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Each byte of a text is a token, and each other token a word."""
    vocab = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"Ġw{number}": number for number in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_adapters(root: Path, count: int) -> list[Path]:
    """Folders of adapters that differ in their scale, some of which share a file of weights."""
    for number in range(min(count, NUM_FILES)):
        (root / f"weights-{number}").mkdir()
    with ThreadPoolExecutor(NUM_FILES) as pool:
        list(pool.map(write_cold_adapter, root.glob("weights-*")))
    folders = []
    for number in range(count):
        source, folder = root / f"weights-{number % NUM_FILES}", root / f"adapter-{number}"
        folder.mkdir()
        os.link(source / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        config = json.loads((source / "adapter_config.json").read_text())
        config["lora_alpha"] = 8 + number // NUM_FILES
        (folder / "adapter_config.json").write_text(json.dumps(config))
        folders.append(folder)
    return folders


def upload(stack: LocalStack, key: str, folders: Sequence[Path]) -> float:
    """Uploads adapters under their folders' names, several at a time. Returns seconds."""

    def send(folder: Path) -> None:
        with AdaptersClient(stack.url, key) as client:
            client.upload(folder, folder.name, on_sent=lambda count: None)

    began = time.perf_counter()
    with ThreadPoolExecutor(UPLOADS_AT_ONCE) as pool:
        list(pool.map(send, folders))
    return time.perf_counter() - began


class Clients:
    """Sends chats to a stack and sums up what came.

    Args:
        keys: of the tenants, each of which has all adapters.
    """

    def __init__(self, stack: LocalStack, port: int, keys: Sequence[str]) -> None:
        self._stack = stack
        self._port = port
        self._keys = keys
        self._rng = random.Random(0)

    def touch_adapters(self, count: int) -> None:
        """Has the engine load adapters."""
        self._send(Case(count, count), 16, 2)

    def run(self, case: Case) -> dict[str, float]:
        """The figures of one case; times in milliseconds, rates in tokens a second."""
        tree = machine.process_tree(self._stack.process.pid)
        used = {process: machine.processor_seconds(process) for process in tree}
        result = self._send(case, PROMPT, OUTPUT)
        used = {process: machine.processor_seconds(process) - before for process, before in used.items()}
        assert result.tokens == case.streams * OUTPUT, result.tokens
        gaps, firsts = 1e3 * np.array(result.gaps), 1e3 * np.array(result.first_texts)
        names = {process: _name_of(process) for process in tree}
        return {
            "output": result.tokens / result.whole_seconds,
            "first_token_median": float(np.median(firsts)),
            "first_token_p99": float(np.percentile(firsts, 99)),
            "between_tokens_median": float(np.median(gaps)),
            "between_tokens_p99": float(np.percentile(gaps, 99)),
            "tokens_an_event": result.tokens / result.events,
            **{
                f"{name}_cores": sum(used[each] for each in tree if names[each] == name)
                / result.whole_seconds
                for name in ("engine", "gateway")
            },
        }

    def _send(self, case: Case, prompt: int, output: int) -> StreamResult:
        requests = []
        for number in range(case.streams):
            model = f"adapter-{number % case.adapters}" if case.adapters else MODEL
            text = "".join(self._rng.choices(string.ascii_letters, k=prompt))
            body = chat(model, text, stream=True, max_tokens=output) | {"temperature": 0}
            requests.append(http_request(self._keys[number % case.tenants], body))
        return uvloop.run(run_streams(self._port, requests))


def _name_of(process: int) -> str:
    """``engine`` or ``gateway`` for these two processes."""
    try:
        arguments = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return ""
    return arguments[2] if len(arguments) > 2 and arguments[1] == "-m" else ""


def measure(config: ModelConfig, device: str, rounds: int) -> dict[str, Any]:
    """Everything, as a JSON document."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        root = Path(name)
        began = time.perf_counter()
        write_model(root / "model", config, device)
        folders = write_adapters(root, NUM_ADAPTERS)
        report: dict[str, Any] = {"machine": machine.facts(), "write_s": time.perf_counter() - began}
        print(report, flush=True)
        ports = free_ports()
        flags = ["--served-model-name", MODEL, "--lora-memory-bytes", str(LORA_MEMORY), "--device", device]
        began = time.perf_counter()
        with local_stack(root / "model", ports, flags) as stack:
            report["ready_s"] = time.perf_counter() - began
            print("\n".join(stack.lines), flush=True)
            keys = [stack.create_tenant(f"tenant-{number}") for number in range(NUM_TENANTS)]
            report["upload_s"] = [upload(stack, key, folders) for key in keys]
            shutil.rmtree(root / "model", ignore_errors=True)
            clients = Clients(stack, ports.gateway, keys)
            clients.touch_adapters(NUM_ADAPTERS)
            report["cases"] = {}
            for name, case in CASES.items():
                report["cases"][name] = _middle([clients.run(case) for _ in range(rounds)])
                print(f"{name}: {report['cases'][name]}", flush=True)
        return report


def _middle(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over rounds of each figure."""
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_stack.json"))
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    report = measure(LLAMA_8B, "cuda", options.rounds)
    options.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
