"""Activated LoRA against PEFT's own `generate`: the base model, and from the invocation on the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.variants import calculate_alora_offsets

from engine.block_pool import BLOCK_SIZE
from engine.model.loading import LoadedModel, load_model
from engine.scheduler import SchedulerLimits
from tests.engine.engine_driver import Ask, EngineDriver
from tests.model_zoo import save_adapter, save_tiny_model
from tests.oracles import Answer

NUM_ADAPTERS = 10
NUM_TOKENS = 12
Asked = tuple[str | None, list[int]]
"""An adapter and a prompt."""

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Zoo:
    """A tiny model of which PEFT and the engine hold a copy each, with the same ten activated adapters."""

    model: LoadedModel
    peft: PeftModel
    folders: dict[str, Path]
    invocations: dict[str, tuple[int, ...]]

    def offset(self, adapter: str, prompt: Sequence[int]) -> int | None:
        """How many of the prompt's last tokens PEFT applies the adapter to; None: it does not occur."""
        configs: Any = self.peft.peft_config
        return calculate_alora_offsets(configs, adapter, torch.tensor([prompt]))[0]

    def start(self, adapter: str, prompt: Sequence[int]) -> int | None:
        """Where PEFT lets the adapter begin; None: nowhere."""
        offset = self.offset(adapter, prompt)
        return None if offset is None else len(prompt) - offset

    def ask(self, adapter: str | None, prompt: Sequence[int]) -> Ask:
        start = 0 if adapter is None else self.start(adapter, prompt)
        return Ask(adapter if start is not None else None, tuple(prompt), NUM_TOKENS, start or 0)

    @torch.inference_mode()
    def generated(self, adapter: str | None, prompt: Sequence[int]) -> tuple[int, ...]:
        """What PEFT generates, greedily."""
        ids = torch.tensor([prompt])
        with self._with(adapter):
            found = self.peft.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        return tuple(found[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def assert_own(self, asked: Sequence[Asked], answers: Sequence[Answer]) -> None:
        """Every token of every answer is PEFT's best after those before it: the answer that it generates."""
        for (adapter, prompt), answer in zip(asked, answers, strict=True):
            assert len(answer.tokens) == NUM_TOKENS
            options: dict[str, Any] = {}
            if adapter is not None:
                # PEFT counts from the end, and would search the answer for the invocation, too.
                offset = self.offset(adapter, prompt)
                options["alora_offsets"] = [offset and offset + NUM_TOKENS - 1]
            with self._with(adapter):
                ids = torch.tensor([[*prompt, *answer.tokens[:-1]]])
                logits = self.peft(ids, logits_to_keep=NUM_TOKENS, **options).logits
            assert tuple(logits[0].argmax(-1).tolist()) == answer.tokens, (adapter, len(prompt))

    def _with(self, adapter: str | None) -> AbstractContextManager[None]:
        if adapter is None:
            return self.peft.disable_adapter()
        self.peft.set_adapter(adapter)
        return nullcontext()


def random_tokens(count: int, seed: int) -> list[int]:
    """Tokens below 300; those of the invocations are above."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    folder = tmp_path_factory.mktemp("activated")
    base = save_tiny_model(folder / "model", max_position_embeddings=4096, eos_token_id=None)
    invocations = {f"a{i}": (300 + i, 310, 311 + i % 2)[: 1 + i % 3] for i in range(NUM_ADAPTERS)}
    folders = {
        name: save_adapter(
            base,
            folder / name,
            rank=(4, 8, 16, 20)[i % 4],
            targets=ALL_MODULES if i % 2 else ("q_proj", "v_proj", "down_proj"),
            seed=10 + i,
            alora_invocation_tokens=list(invocation),
        )
        for i, (name, invocation) in enumerate(invocations.items())
    }
    peft: PeftModel | None = None
    for name, path in folders.items():
        if peft is None:
            peft = PeftModel.from_pretrained(base, str(path), adapter_name=name)
        else:
            peft.load_adapter(str(path), adapter_name=name)
    assert peft is not None
    model = load_model(str(folder / "model"), dtype="float32", device="cpu", max_model_len=None)
    return Zoo(model, peft.eval(), folders, invocations)


@pytest.fixture
def engine(zoo: Zoo) -> Iterator[EngineDriver]:
    engine = EngineDriver(
        zoo.model,
        zoo.folders,
        num_blocks=400,
        num_rank_pages=16,
        limits=SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=384),
    )
    yield engine
    engine.close()


def test_ten_adapters_over_one_long_document_compute_it_once(zoo: Zoo, engine: EngineDriver) -> None:
    document = random_tokens(2000, 1)
    engine.run([zoo.ask(None, document)])
    assert engine.num_cached_tokens == 0
    asked: list[Asked] = [(None, [*document, *random_tokens(9, 2)])]
    for name, invocation in zoo.invocations.items():
        asked.append((name, [*document, *invocation, *random_tokens(7, 3)]))
    answers = engine.run([zoo.ask(name, prompt) for name, prompt in asked])
    assert engine.num_cached_tokens == len(asked) * (len(document) // BLOCK_SIZE * BLOCK_SIZE)
    for (name, prompt), answer in zip(asked, answers, strict=True):
        assert answer.tokens == zoo.generated(name, prompt), name
    assert len({answer.tokens for answer in answers}) == len(answers), "an adapter that changes nothing"


@pytest.mark.parametrize("before", [0, 1, 15, 16, 17, 32])
@pytest.mark.parametrize("after", [0, 9])
def test_the_start_may_be_anywhere(zoo: Zoo, engine: EngineDriver, before: int, after: int) -> None:
    """Inside a block, at its border, in the first token and in the last, mixed with plain requests."""
    text = random_tokens(80, 4)
    asked: list[Asked] = []
    for name in ("a0", "a1", "a2", "a3"):
        asked.append((name, [*text[:before], *zoo.invocations[name], *text[before : before + after]]))
    asked.append((None, asked[2][1]))
    answers = engine.run([zoo.ask(name, prompt) for name, prompt in asked])
    zoo.assert_own(asked, answers)
    again = engine.run([zoo.ask(name, prompt) for name, prompt in asked])  # most of it from the cache
    assert again == answers


def test_of_several_invocations_the_last_counts_and_without_one_the_base_model_answers(
    zoo: Zoo, engine: EngineDriver
) -> None:
    text, name = random_tokens(60, 5), "a2"
    invocation = zoo.invocations[name]
    assert len(invocation) == 3
    twice = [*text[:20], *invocation, *text[20:], *invocation, *text[:5]]
    cut_off = [*text[:20], *invocation, *text[20:], *invocation[:2]]
    without = [*text, *invocation[:2]]
    assert (zoo.start(name, twice), zoo.start(name, cut_off), zoo.start(name, without)) == (63, 20, None)
    asked: list[Asked] = [(name, prompt) for prompt in (twice, cut_off, without)]
    answers = engine.run([zoo.ask(*each) for each in asked])
    for (adapter, prompt), answer in zip(asked, answers, strict=True):
        assert answer.tokens == zoo.generated(adapter, prompt)
    assert answers[2].tokens == zoo.generated(None, without)


def test_preempted_and_chunked_they_still_answer_as_peft_does(zoo: Zoo) -> None:
    engine = EngineDriver(
        zoo.model,
        zoo.folders,
        num_blocks=12,
        num_rank_pages=6,
        limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=11),
    )
    text = random_tokens(45, 6)
    asked: list[Asked] = [(None, text)]
    asked += [(name, [*text, *inv, *text[:10]]) for name, inv in list(zoo.invocations.items())[:6]]
    answers = engine.run([zoo.ask(name, prompt) for name, prompt in asked])
    engine.close()
    assert engine.scheduler.num_preemptions > 0
    zoo.assert_own(asked, answers)
