"""Which tokenizers of adapters are taken, and that the others are refused with what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.tokenizer import ModelTokenizer
from gateway.tokenizer_bounds import Unbounded
from gateway.tokenizer_check import Unfit, judge
from gateway.tokenizer_effect import TokenizerEffect
from tests.gateway.fake_engine import TOKENIZER_FILES
from tests.gateway.own_tokenizer_files import Files, changed, extra_token, token

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CLEAN = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": False,
    "strip_accents": True,
    "lowercase": False,
}
"""Leaves out accents, and characters that are not seen."""


@pytest.fixture
def small() -> Files:
    """The files of a tokenizer of 462 tokens, for what needs no real one."""
    return TOKENIZER_FILES


HOSTILE: dict[str, tuple[Callable[[Files], Files], str]] = {
    "no JSON": (lambda base: {"tokenizer.json": b"{"}, "cannot be read"),
    "no object": (lambda base: {"tokenizer_config.json": b"[]"}, "is not a JSON object"),
    "nested": (lambda base: {"tokenizer_config.json": b"[" * 100_000}, "is not JSON"),
    "nested tokenizer": (lambda base: {"tokenizer.json": b'{"model":' * 10_000}, "cannot be read"),
    "empty": (lambda base: {"tokenizer.json": b"{}"}, "cannot be read"),
    "another vocabulary": (
        lambda base: changed(base, lambda d: d["model"]["vocab"].update({"zzzzq": len(d["model"]["vocab"])})),
        "another model than the base model's",
    ),
    "a regular expression that backtracks": (
        lambda base: changed(
            base,
            lambda d: d.update(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            ),
        ),
        "another pre_tokenizer than the base model's",
    ),
    "a normalizer that explodes": (
        lambda base: changed(
            base,
            lambda d: d.update(
                normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}
            ),
        ),
        "another normalizer than the base model's",
    ),
    "lstrip": (lambda base: changed(base, extra_token(lstrip=True)), "sets lstrip on the token '<x>'"),
    "single_word": (lambda base: changed(base, extra_token(single_word=True)), "sets single_word"),
    "white space with rstrip": (
        lambda base: changed(base, extra_token(content="\t", rstrip=True)),
        r"sets rstrip on the token '\\t', with which splitting a text takes time in the square",
    ),
    "a long token": (lambda base: changed(base, extra_token(content="x" * 300)), "a token of 300 characters"),
    "a gap": (lambda base: changed(base, extra_token(id=600)), "number 600, but it comes to be 462"),
    "too many": (
        lambda base: changed(
            base, lambda d: d["added_tokens"].extend(token(462 + i, f"<{i}>") for i in range(70_000))
        ),
        "adds more than 65,536 tokens",
    ),
    "a long surrounding": (
        lambda base: around(base, template("s" * 4000 + "A")),
        "of more than 16,384 bytes",
    ),
    "many around": (lambda base: around(base, template("sA", [257] * 300)), "adds more than 256 tokens"),
    "a text many times": (lambda base: around(base, template("A" * 390)), "does not have the text A once"),
    "a text not at all": (lambda base: around(base, template("s")), "does not have the text A once"),
    "an unknown token": (
        lambda base: around(base, template("sA", [4_000_000_000])),
        "adds token 4000000000, which the vocabulary does not have",
    ),
    "an unknown token of BERT's": (
        lambda base: around(base, {"type": "BertProcessing", "sep": ["</s>", 257], "cls": ["<s>", 462]}),
        "adds token 462",
    ),
    "a token that is not named": (
        lambda base: around(base, template("sA") | {"special_tokens": {}}),
        "which is not in its special_tokens",
    ),
    "two surroundings": (
        lambda base: around(base, in_turn(template("sA"), template("sA"))),
        "of several parts that add tokens",
    ),
    "surroundings in surroundings": (
        lambda base: around(base, in_turn(in_turn(template("sA"), template("sA")))),
        "of several parts that add tokens",
    ),
    "an unknown name": (
        lambda base: {"tokenizer_config.json": b'{"eos_token": "<nowhere>"}'},
        "names the token '<nowhere>'",
    ),
    "a wrong number": (
        lambda base: {"tokenizer_config.json": b'{"added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}'},
        "names the token '<|im_end|>'",
    ),
    "no template": (lambda base: {"chat_template.jinja": b"{% if %}"}, "is no template"),
    "a nested template": (lambda base: {"chat_template.jinja": b"{{" + b"(" * 50_000}, "nested too deeply"),
    "a long template": (lambda base: {"chat_template.jinja": b"x" * 300_000}, "more than 262,144 characters"),
}


def around(base: Files, post_processor: dict[str, Any]) -> Files:
    return changed(base, lambda document: document.update(post_processor=post_processor))


def template(single: str, numbers: Sequence[int] = (257,)) -> dict[str, Any]:
    """A post-processor that makes of a text what `single` says: `A` is the text, `s` a special token."""
    text, other = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    piece = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    names = [f"<{number}>" for number in numbers]
    return {
        "type": "TemplateProcessing",
        "single": [text if letter == "A" else piece for letter in single],
        "pair": [text, other],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [*numbers], "tokens": names}},
    }


def in_turn(*processors: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "processors": [*processors]}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_not_served_exactly_is_refused_by_name(small: Files, kind: str) -> None:
    make, sentence = HOSTILE[kind]
    with pytest.raises(Unfit, match=sentence):
        judge(make(small), small)


@pytest.mark.parametrize(
    ("post_processor", "before", "behind"),
    [
        (template("sA"), [257], []),
        (template("sAs", [256, 257]), [256, 257], [256, 257]),
        (in_turn(BYTE_LEVEL, template("As")), [], [257]),
        ({"type": "BertProcessing", "sep": ["</s>", 257], "cls": ["<s>", 256]}, [256], [257]),
    ],
    ids=["template", "two tokens", "sequence", "BERT"],
)
def test_tokens_around_a_text_are_served(
    small: Files, post_processor: dict[str, Any], before: list[int], behind: list[int]
) -> None:
    effect = judge(around(small, post_processor), small)
    assert effect is not None
    own = ModelTokenizer.from_files(small).extended(effect)
    text = own.encode("Hi", add_special_tokens=False)
    assert own.encode("Hi", add_special_tokens=True) == [*before, *text, *behind]


def test_a_token_that_is_white_space_once_normalised_takes_no_run_of_it(small: Files) -> None:
    """The library looks for the normalised token, in the normalised text."""
    base = changed(small, lambda document: document.update(normalizer=CLEAN))
    hidden = extra_token(content="\u0301", rstrip=True, normalized=True)
    with pytest.raises(Unfit, match="sets rstrip on"):
        judge(changed(base, hidden), base)
    assert judge(changed(base, extra_token(content="<x>", rstrip=True, normalized=True)), base) is not None


def test_a_token_of_the_base_model_s_may_be_what_an_adapter_s_may_not(small: Files) -> None:
    base = changed(small, extra_token(content="\t", rstrip=True))
    effect = judge(changed(base, extra_token(id=463)), base)
    assert effect is not None
    assert ModelTokenizer.from_files(base).extended(effect).encode("\t\t<x>", add_special_tokens=False)


UNBOUNDED: dict[str, Callable[[TokenizerEffect], TokenizerEffect]] = {
    "rstrip": lambda effect: replace(
        effect, added_tokens=(*effect.added_tokens, token(462, "\t", rstrip=True))
    ),
    "around": lambda effect: replace(effect, post_processor=template("A" * 390)),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_what_was_stored_is_held_to_the_same_bounds(small: Files, kind: str) -> None:
    effect = judge({"chat_template.jinja": b"{{ 1 }}"}, small)
    assert effect is not None
    with pytest.raises(Unbounded):
        ModelTokenizer.from_files(small).extended(UNBOUNDED[kind](effect))
