"""Beam searches on the real engine, in company: transformers finds the same answers for each alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from engine.beams import BeamOptions, EarlyStopping
from engine.model.loading import LoadedModel, load_model
from tests.engine.live_engine import live_engine
from tests.model_zoo import save_adapter, save_tiny_model

ADAPTERS = {"attention": ("q_proj", "v_proj"), "all": ("q_proj", "o_proj", "gate_proj", "down_proj")}
COUNT = 20
EARLY = {EarlyStopping.OFF: False, EarlyStopping.ON: True, EarlyStopping.NEVER: "never"}


@dataclass(frozen=True)
class Search:
    adapter: str | None
    prompt: tuple[int, ...]
    options: BeamOptions


@dataclass
class Zoo:
    loaded: LoadedModel
    peft: PeftModel
    folders: dict[str, Path]
    found: dict[Search, list[list[int]]] = field(default_factory=dict)

    def answers(self, search: Search) -> list[list[int]]:
        """What transformers finds, the best first; without what fills the ends up."""
        if search not in self.found:
            self.found[search] = self._generate(search)
        return self.found[search]

    @torch.no_grad()
    def _generate(self, search: Search) -> list[list[int]]:
        options, prompt = search.options, search.prompt
        ids = torch.tensor([prompt])
        if search.adapter is not None:
            self.peft.set_adapter(search.adapter)
        with self.peft.disable_adapter() if search.adapter is None else nullcontext():
            found: Any = self.peft.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=options.max_tokens,
                num_beams=options.width,
                num_return_sequences=options.width,
                do_sample=False,
                length_penalty=options.length_penalty,
                early_stopping=EARLY[options.early_stopping],
                eos_token_id=sorted(options.end_tokens) or None,
                pad_token_id=0,
            )
        answers = []
        for row in found[:, len(prompt) :].tolist():
            ends = [i + 1 for i, token in enumerate(row) if token in options.end_tokens]
            answers.append(row[: min([*ends, options.max_tokens])])
        return answers


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("beams")
    model = save_tiny_model(root / "model", eos_token_id=None)
    folders = {
        name: save_adapter(model, root / name, rank=8, targets=targets, seed=seed)
        for seed, (name, targets) in enumerate(ADAPTERS.items())
    }
    loaded = load_model(str(root / "model"), dtype="float32", device="cpu", max_model_len=None)
    peft: Any = None
    for name, folder in folders.items():
        if peft is None:
            peft = PeftModel.from_pretrained(model, str(folder), adapter_name=name).eval()
        else:
            peft.load_adapter(str(folder), adapter_name=name)
    yield Zoo(loaded, peft, folders)
    torch.set_num_threads(threads)


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple(3 + (7 * number + 13 * index) % 300 for index in range(length))


def searches(zoo: Zoo) -> list[Search]:
    """Of several kinds, through the base model and both adapters; half with end tokens that come up."""
    plain = [
        Search(None, prompt(1, 40), BeamOptions(4, COUNT)),
        Search("attention", prompt(2, 37), BeamOptions(3, COUNT, length_penalty=0.0)),
        Search("all", prompt(1, 40), BeamOptions(4, COUNT, early_stopping=EarlyStopping.NEVER)),
    ]
    ending = []
    for early, search in zip(EARLY, plain, strict=True):
        ends = frozenset(answer[6] for answer in zoo.answers(search)[:2])
        options = replace(search.options, end_tokens=ends, early_stopping=early, length_penalty=-1.0)
        ending.append(replace(search, options=options))
    return [*plain, *ending]


@pytest.mark.parametrize("num_blocks", [256, 40], ids=["roomy", "tight"])
def test_searches_in_company_find_what_transformers_does_alone(
    zoo: Zoo, num_blocks: int, tmp_path: Path
) -> None:
    """Beside one another and beside greedy requests, with room for all or only for some at a time."""
    asked = searches(zoo)
    greedy = [Search(name, prompt(5, 30), BeamOptions(1, 40)) for name in (None, *ADAPTERS)]
    with live_engine(zoo.loaded, zoo.folders, tmp_path, num_pages=4, num_blocks=num_blocks) as engine:
        for number, each in enumerate([*greedy, *asked]):
            options = each.options
            beams = None if each in greedy else options
            count = options.max_tokens
            engine.submit(number, each.adapter, each.prompt, count, n=options.width, beams=beams)
        engine.run()
        assert (engine.scheduler.num_preemptions > 0) == (num_blocks < 100)
        engine.check_all_free()
    lengths = set()
    for number, each in enumerate([*greedy, *asked]):
        want = zoo.answers(each)
        got = [engine.tokens[number, choice] for choice in range(each.options.width)]
        assert got == want, each
        lengths |= {len(answer) for answer in got}
        ends = {engine.finished[number, choice] for choice in range(each.options.width)}
        assert ends <= {"LENGTH", "STOP"}
    assert min(lengths) < COUNT in lengths, "some have met an end token"
