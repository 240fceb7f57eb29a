"""Tokenizer files from a GGUF vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.model.errors import UnsupportedModel
from engine.model.gguf import GgufFile
from engine.model.gguf_tokenizer import tokenizer_files
from tests.model_zoo import smollm2_path


@pytest.fixture(scope="module")
def smollm2() -> dict[str, Any]:
    return GgufFile(smollm2_path()).metadata


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"].decode())


def test_digits_are_split_one_by_one(smollm2: dict[str, Any]) -> None:
    """What the smollm pre-tokenizer is for: else "2024" would be merged, and numbers read wrongly."""
    tokenizer = tokenizer_of(smollm2)
    assert tokenizer.encode("in 2024, 3.14159").tokens == [
        *("in", "Ġ", "2", "0", "2", "4", ",", "Ġ", "3", ".", "1", "4", "1", "5", "9")
    ]


@pytest.mark.parametrize(
    "text",
    ["Hello  world\n\n\tx", "naïve café — 東京 🗼🏽", "def f(x):\r\n    return x**2", " lead and trail "],
)
def test_text_comes_back(smollm2: dict[str, Any], text: str) -> None:
    tokenizer = tokenizer_of(smollm2)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_control_tokens_are_one_token_and_bos_is_not_added(smollm2: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(smollm2)
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids[:2] == [1, tokenizer.token_to_id("user")]
    assert tokenizer.encode("Hi").ids[0] != 1
    assert tokenizer.decode(tokenizer.encode("<|im_start|>x<|im_end|>").ids) == "x"
    files = tokenizer_files(smollm2)
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert config["add_bos_token"] is False
    assert files["chat_template.jinja"].startswith(b"{% for message in messages %}")


def test_bos_and_eos_are_added_where_the_file_asks_for_it(smollm2: dict[str, Any]) -> None:
    asked = {**smollm2, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer_of(asked).encode("Hi").ids == [1, *tokenizer_of(smollm2).encode("Hi").ids, 2]


@pytest.mark.parametrize(
    ("pre", "tokens"), [("llama-bpe", ["Ġ", "123", "45"]), ("qwen2", ["Ġ", "1", "2", "3", "4", "5"])]
)
def test_numbers_by_pre_tokenizer(smollm2: dict[str, Any], pre: str, tokens: list[str]) -> None:
    files = tokenizer_files({**smollm2, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(" 12345")] == tokens


@pytest.mark.parametrize(
    ("field", "value"), [("tokenizer.ggml.pre", "deepseek-v3"), ("tokenizer.ggml.model", "llama")]
)
def test_what_is_not_known_is_refused(smollm2: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(UnsupportedModel, match=value):
        tokenizer_files({**smollm2, field: value})
