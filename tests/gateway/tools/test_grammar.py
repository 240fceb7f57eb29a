"""What grammars for calls let through, where markers are tokens and where they are spelt."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from gateway.grammars import lark_grammar
from gateway.tokenizer import ModelTokenizer
from gateway.tools.forms import HERMES, LLAMA, MISTRAL, CallForm
from gateway.tools.grammar import call_grammar
from gateway.tools.parser import CallBegin, CallParser
from gateway.tools.use import Calls, Function, ToolUse
from tests.gateway.fake_engine import EOS, TOKENIZER_FILES
from tests.gateway.tool_templates import tokenizer_files

PARAMETERS = {
    "$ref": "#/$defs/Args",
    "$defs": {"Args": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
STRICT = Function("f", "", PARAMETERS, strict=True)
CALL = '{"name": "f", "arguments": {"a": 1}}'
WRONG = '{"name": "f", "arguments": {"a": ""}}'


class Vocabulary:
    """A tokenizer as the gateway and as the engine have it."""

    def __init__(self, files: dict[str, bytes], end_tokens: tuple[int, ...] = ()) -> None:
        self.gateway = ModelTokenizer.from_files(files)
        self.gateway.end_tokens = end_tokens
        self._tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        self._engine = LLTokenizer(files["tokenizer.json"].decode(), n_vocab=512, eos_token=[EOS])

    def fits(self, use: ToolUse, form: CallForm, text: str, *more: int, content: Any = None) -> bool:
        grammar, fault = lark_grammar(call_grammar(use, form, self.gateway, content))
        assert not fault
        matcher = LLMatcher(self._engine, grammar, log_level=0)
        tokens = [*self._tokenizer.encode(text, add_special_tokens=False).ids, *more]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


TOKENS = Vocabulary(tokenizer_files(""))  # where <tool_call> is a token, as in Qwen's
SPELT = Vocabulary(TOKENIZER_FILES)  # where it is spelt


@pytest.mark.parametrize("vocabulary", [TOKENS, SPELT], ids=["tokens", "spelt"])
@pytest.mark.parametrize(("form", "opening", "closing"), [
    (HERMES, "<tool_call>\n", "\n</tool_call>"),
    (MISTRAL, "[TOOL_CALLS] [", "]"),
    (LLAMA, "", ""),
    (LLAMA, "<|python_tag|>", ""),
])  # fmt: skip
def test_only_calls_that_fit_may_come(
    vocabulary: Vocabulary, form: CallForm, opening: str, closing: str
) -> None:
    use = ToolUse([STRICT])

    def fits(text: str) -> bool:
        return vocabulary.fits(use, form, text.replace("arguments", form.arguments))

    for before, (call, good) in product(("", "Let's <call> it\n", "So"), ((CALL, True), (WRONG, False))):
        if not before or not form.bare:
            assert fits(before + opening + call + closing) == good
    assert fits("only text < [TOOL_CALL") and fits("")
    if not form.bare:
        assert not fits("text and " + opening)


@pytest.mark.parametrize("vocabulary", [TOKENS, SPELT], ids=["tokens", "spelt"])
def test_text_may_have_tags(vocabulary: Vocabulary) -> None:
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    for text, good in (("<think>so</think>", True), (f"<think>so</think>\n{call}", True),
                       (f"<think></think>{call}\n{call}", True), (f"<think>{call}", True),
                       (f"<think>so</think><tool_call>\n{WRONG}\n</tool_call>", False)):  # fmt: skip
        assert vocabulary.fits(ToolUse([STRICT]), HERMES, text) == good


def test_an_adapter_s_own_end_token_is_an_end() -> None:
    end = 300
    vocabulary = Vocabulary(tokenizer_files(""), (end,))
    use = ToolUse([STRICT], Calls.REQUIRED)
    assert vocabulary.fits(use, MISTRAL, f"[TOOL_CALLS] [{CALL}]", end)
    assert not TOKENS.fits(use, MISTRAL, f"[TOOL_CALLS] [{CALL}]", end)
    assert not vocabulary.fits(use, MISTRAL, "[TOOL_CALLS] [", end)


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("text", ["{}", '{"x": {"name": [1]}}'])
def test_content_has_its_own_schema(form: CallForm, text: str) -> None:
    use = ToolUse([STRICT])
    assert TOKENS.fits(use, form, text, content={"type": "object"})
    assert not TOKENS.fits(use, form, text, content={"type": "object", "required": ["y"]})
    assert not TOKENS.fits(use, form, "text", content={"type": "object"})


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_what_the_grammar_makes_is_read_as_calls(form: CallForm) -> None:
    """The grammar's own tokens, where each step has one way on, are read by the parser."""
    only = Function("only", "", {"type": "object", "properties": {"a": {"const": "日本"}}, "required": ["a"],
                                 "additionalProperties": False})  # fmt: skip
    grammar, _ = lark_grammar(call_grammar(ToolUse([only], Calls.REQUIRED, "only"), form, SPELT.gateway))
    matcher = LLMatcher(SPELT._engine, grammar, log_level=0)
    text = b""
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [t for t in range(462) if mask[t // 8] >> (t % 8) & 1 and t != EOS]
        # The marker of a form that may go without, and the space before a list, are passed over.
        token = max(allowed, key=lambda t: SPELT.gateway.token_bytes(t) == b"{")
        matcher.consume_token(token)
        text += SPELT.gateway.token_bytes(token)
    parser = CallParser(form, ["only"])
    events = parser.feed(text.decode()) + parser.finish()
    assert isinstance(events[0], CallBegin) and events[0].name == "only"
    assert json.loads("".join(event.text for event in events[1:])) == {"a": "日本"}  # type: ignore[union-attr]
