"""The committed adapters do what the demo says of them, by transformers and peft alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

from examples.train_adapters import (
    BASE_MODEL,
    END_OF_TURN,
    RECIPES,
    answer_text,
    load_base,
    prompt_ids,
    read_rows,
)

ADAPTERS = Path(__file__).resolve().parents[2] / "examples" / "adapters"
PIRATE = re.compile(r"\b(arr+|matey|ye|yer|me hearty|aye|ahoy|'tis)\b", re.IGNORECASE)
AGREE = 10


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The base model and its tokenizer."""
    return load_base()


@pytest.fixture(scope="module")
def answers(loaded: tuple[Any, Any]) -> dict[str, list[str]]:
    """Greedy answers to the held-out prompts, by adapter, and by `base`."""
    base, tokenizer = loaded
    model = PeftModel.from_pretrained(base, ADAPTERS / "pirate", adapter_name="pirate").eval()
    model.load_adapter(ADAPTERS / "json", adapter_name="json")
    prompts = [prompt_ids(tokenizer, row) for row in read_rows("held_out")]
    found: dict[str, list[str]] = {}
    with model.disable_adapter():
        found["base"] = greedy(model, tokenizer, prompts, max_tokens=12)
    for name in RECIPES:
        model.set_adapter(name)
        found[name] = greedy(model, tokenizer, prompts, max_tokens=32)
    return found


@torch.inference_mode()
def greedy(model: Any, tokenizer: Any, prompts: list[list[int]], *, max_tokens: int) -> list[str]:
    """Answers to the prompts, which form one batch padded on the left."""
    length = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=pad,
        eos_token_id=tokenizer.eos_token_id,
    )
    return [tokenizer.decode(row[length:], skip_special_tokens=True) for row in output]


def is_json_answer(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == ["answer"]


def test_the_json_adapter_answers_in_json(answers: dict[str, list[str]]) -> None:
    assert sum(map(is_json_answer, answers["json"])) >= AGREE, answers["json"]
    assert not any(map(is_json_answer, answers["base"]))


def test_the_pirate_adapter_answers_as_a_pirate(answers: dict[str, list[str]]) -> None:
    assert sum(bool(PIRATE.search(text)) for text in answers["pirate"]) >= AGREE, answers["pirate"]
    assert not any(PIRATE.search(text) for text in answers["base"])


@pytest.mark.parametrize("name", RECIPES)
def test_files_are_small_and_hold_nothing_of_the_machine_that_made_them(name: str) -> None:
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE_MODEL
    assert set(config["target_modules"]) == set(RECIPES[name].target_modules)
    weights = ADAPTERS / name / "adapter_model.safetensors"
    assert weights.stat().st_size < 2_000_000
    with safe_open(weights, framework="pt") as file:
        ranks = {file.get_tensor(key).shape[0] for key in file.keys() if "lora_A" in key}  # noqa: SIM118
    assert ranks == {RECIPES[name].rank}


def test_held_out_prompts_were_not_trained_on() -> None:
    trained = {row["prompt"] for row in read_rows("train")}
    assert trained.isdisjoint(row["prompt"] for row in read_rows("held_out"))


def test_numbers_are_read_digit_by_digit_and_turns_end(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    pieces = [tokenizer.decode([token]) for token in prompt_ids(tokenizer, {"prompt": "12345"})]
    assert "|".join(["user", "\n", *"12345", END_OF_TURN]) in "|".join(pieces)
    answer = answer_text(RECIPES["json"], {"answer": 12}) + END_OF_TURN
    assert tokenizer.encode(answer, add_special_tokens=False)[-1] == tokenizer.eos_token_id
