"""What transformers and peft say that the engine should have answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

TIE = 1e-4
"""Two best logits closer than this may be told apart differently by another order of summation."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer of the engine. ``adapter`` is a key of the oracle's adapters, None for the base."""

    adapter: str | None
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that peft would not have chosen. ``margin``: between peft's two best logits there."""

    answer: Answer
    index: int
    expected: int
    got: int
    margin: float

    @property
    def is_tie(self) -> bool:
        return self.margin < TIE


class PeftOracle:
    """transformers, with peft adapters over it, on the CPU in float32.

    Each answer is checked in one forward pass over prompt and answer: if every token is peft's best after
    those before it, the answer is peft's own greedy one, and if one is not, the rest is still checked.
    """

    def __init__(self, model: PreTrainedModel, adapters: Mapping[str, Path]) -> None:
        self._base = model
        self._peft: PeftModel | None = None
        for name, folder in adapters.items():
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
            else:
                self._peft.load_adapter(str(folder), adapter_name=name)

    def differences(self, answers: Sequence[Answer]) -> list[Difference]:
        """Every token that is not peft's own, ties included."""
        groups: defaultdict[tuple[Any, ...], list[Answer]] = defaultdict(list)
        for answer in answers:
            groups[answer.adapter, len(answer.prompt), len(answer.tokens)].append(answer)
        return [found for group in groups.values() for found in self._check(group)]

    @torch.inference_mode()
    def logprobs(self, adapter: str | None, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens) - 1, V]: of each token but the first, and of whatever else could have stood there."""
        logits = self._logits(adapter, torch.tensor([tokens]), keep=len(tokens))
        return logits[0, :-1].log_softmax(-1)

    @torch.inference_mode()
    def _check(self, answers: Sequence[Answer]) -> list[Difference]:
        """Answers of one adapter and of equal lengths, as one batch."""
        prompt_len, count = len(answers[0].prompt), len(answers[0].tokens)
        ids = torch.tensor([answer.prompt + answer.tokens[:-1] for answer in answers])
        logits = self._logits(answers[0].adapter, ids, keep=count)
        assert logits.shape[1] == count and ids.shape[1] == prompt_len + count - 1
        best = logits.topk(2, dim=-1)
        expected = logits.argmax(dim=-1).tolist()
        margins = (best.values[..., 0] - best.values[..., 1]).tolist()
        return [
            Difference(answer, i, expected[row][i], token, margins[row][i])
            for row, answer in enumerate(answers)
            for i, token in enumerate(answer.tokens)
            if token != expected[row][i]
        ]

    def _logits(self, adapter: str | None, ids: torch.Tensor, *, keep: int) -> torch.Tensor:
        if self._peft is None:
            return self._base(ids, logits_to_keep=keep).logits
        if adapter is None:
            with self._peft.disable_adapter():
                return self._peft(ids, logits_to_keep=keep).logits
        self._peft.set_adapter(adapter)
        return self._peft(ids, logits_to_keep=keep).logits


def assert_only_ties(differences: Sequence[Difference]) -> None:
    """Fail on a difference that peft's own margin does not excuse; list those that it does."""
    for found in differences:
        report = (
            f"{found.answer.adapter or 'base'}, token {found.index}: got {found.got}, peft {found.expected}, "
            f"margin {found.margin:.2e}"
        )
        assert found.is_tie, report
        print(f"allowed as a tie: {report}")
