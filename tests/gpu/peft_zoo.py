"""Random models with adapters that take turns, the engine's runner over them, and what peft makes of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.model.adapter_reading import read_adapter
from engine.model.adapter_weights import HostAdapter
from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.step import RowResult, SamplingParams, StepAdapter, StepPlan, StepRow
from engine.step_memory import measure_step_memory
from tests.model_zoo import save_adapter, save_tiny_model

VOCAB = 512
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = (8, 16, 64)
NUM_IN_PEFT = 6
MAX_SEQS = 72
BLOCKS_EACH = 6
NUM_PAGES = 160
SAMPLING = SamplingParams(logprobs=VOCAB)
TIGHT, ROUNDED = 2e-5, 1e-2
"""Largest ‖Δ‖ / ‖ref‖ of logits in float32, and in bfloat16; of two results in bfloat16, twice that."""


@dataclass(frozen=True, slots=True)
class Zoo:
    """A saved model and its adapters by number, whose ranks take turns; peft holds the first six in float32
    over weights rounded to bfloat16, so that both precisions compute the same function."""

    model_folder: Path
    adapters: dict[int, Path]
    peft: PeftModel


def make_zoo(
    folder: Path,
    *,
    num_adapters: int,
    model_class: type[PreTrainedModel] = LlamaForCausalLM,
    config_class: type[Any] = LlamaConfig,
    overrides: Mapping[str, Any] | None = None,
) -> Zoo:
    """A random model of the kind of `SMALL`, and at least ``NUM_IN_PEFT`` adapters on all its projections."""
    config = {**SMALL, **(overrides or {})}
    model = save_tiny_model(folder / "rough", model_class=model_class, config_class=config_class, **config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    model.save_pretrained(folder / "model")
    adapters = {
        i: save_adapter(
            model, folder / f"adapter{i}", rank=RANKS[i % 3], targets=MODULES, seed=i, lora_alpha=4
        )
        for i in range(num_adapters)
    }
    for i in range(NUM_IN_PEFT):
        _round_adapter(adapters[i])
    peft = PeftModel.from_pretrained(model, str(adapters[0]), adapter_name="0")
    for i in range(1, NUM_IN_PEFT):
        peft.load_adapter(str(adapters[i]), adapter_name=str(i))
    return Zoo(folder / "model", adapters, peft.cuda().eval())


def _round_adapter(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name: value.bfloat16().float() for name, value in load_file(path).items()}, path)


class Engine:
    """A runner with its adapters, and the blocks of sequences by number."""

    def __init__(self, zoo: Zoo, dtype: str, *, graphs: bool) -> None:
        self._zoo = zoo
        self.model: LoadedModel = load_model(
            str(zoo.model_folder), dtype=dtype, device="cuda", max_model_len=None
        )
        self.runner = Runner(
            self.model, num_blocks=MAX_SEQS * BLOCKS_EACH, num_rank_pages=NUM_PAGES, max_lora_rank=64
        )
        if graphs:  # as an engine starts: the first call compiles all kernels at once
            most = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": 512}
            measure_step_memory(self.model, max_lora_rank=64, has_graphs=True, **most)
            self.runner.warm_up(**most)
            self.runner.capture_graphs(**most)

    def read(self, number: int) -> HostAdapter:
        return read_adapter(self._zoo.adapters[number], self.model.network, pin=True)

    def place(self, number: int, pages: tuple[int, ...], adapter_id: int) -> StepAdapter:
        weights = self.read(number)
        self.runner.write_adapter(pages, weights)
        return StepAdapter(adapter_id, pages, weights.rank)


def blocks_of(seq: int) -> tuple[int, ...]:
    """Scattered over the pool, and nobody else's."""
    return tuple(seq + MAX_SEQS * i for i in range(BLOCKS_EACH))


def prefill_row(seq: int, tokens: list[int], adapter: StepAdapter | None) -> StepRow:
    return StepRow(seq, tokens, 0, blocks_of(seq), adapter, sampling=SAMPLING)


def decode_row(seq: int, token: int, start: int, adapter: StepAdapter | None) -> StepRow:
    return StepRow(seq, [token], start, blocks_of(seq), adapter, sampling=SAMPLING)


def logits_of(result: RowResult) -> torch.Tensor:
    """float64 [VOCAB]: a row's log-probabilities, less their mean, which are its logits less theirs."""
    assert result.error is None and result.logprobs is not None, result
    values = torch.empty(VOCAB, dtype=torch.float64)
    values[list(result.logprobs.top_tokens)] = torch.tensor(result.logprobs.top_logprobs, dtype=torch.float64)
    return values - values.mean()


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def free_pages(adapters: list[StepAdapter]) -> list[int]:
    taken = {page for adapter in adapters for page in adapter.pages}
    return [page for page in range(NUM_PAGES) if page not in taken]


@torch.inference_mode()
def peft_logits(peft: PeftModel, adapter: int | None, tokens: list[int], count: int) -> torch.Tensor:
    """float64 [count, VOCAB] on the CPU: the logits after the last tokens, less their means."""
    ids = torch.tensor([tokens], device="cuda")
    if adapter is None:
        with peft.disable_adapter():
            logits = peft(ids).logits
    else:
        peft.set_adapter(str(adapter))
        logits = peft(ids).logits
    wanted = logits[0, -count:].double().cpu()
    return wanted - wanted.mean(dim=1, keepdim=True)


def assert_computes_what_peft_does(
    engine: Engine, zoo: Zoo, owners: Sequence[int | None], limit: float
) -> None:
    """Prompts of mixed lengths, ten in a step, then four decode steps of all: each row under its own adapter,
    by number, or none.
    """
    rng = random.Random(0)
    adapters: list[StepAdapter] = []
    for i in range(NUM_IN_PEFT):
        pages = rng.sample(free_pages(adapters), engine.read(i).num_pages)
        adapters.append(engine.place(i, tuple(pages), i + 1))
    texts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice((5, 16, 33, 80)) + 4)] for _ in owners]
    placed = [None if owner is None else adapters[owner] for owner in owners]
    prompts = [prefill_row(i, text[:-4], placed[i]) for i, text in enumerate(texts)]
    first: list[RowResult] = []
    for start in range(0, len(prompts), 10):
        first += engine.runner.execute(StepPlan(tuple(prompts[start : start + 10]))).rows
    steps: list[Sequence[RowResult]] = [first]
    for k in range(4):
        at = [len(text) - 4 + k for text in texts]
        rows = [decode_row(i, text[at[i]], at[i], placed[i]) for i, text in enumerate(texts)]
        steps.append(engine.runner.execute(StepPlan(tuple(rows))).rows)
    for i, (owner, text) in enumerate(zip(owners, texts, strict=True)):
        want = peft_logits(zoo.peft, owner, text, 5)
        got = torch.stack([logits_of(step[i]) for step in steps])
        assert difference(got, want) < limit, (i, owner, difference(got, want))
        if owner is not None:
            assert difference(peft_logits(zoo.peft, None, text, 5), want) > 5 * limit, "adapters must matter"
