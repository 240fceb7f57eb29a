"""What is thought and what is said: the same split wherever the text is cut, and answers that follow it."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from gateway.detokenizer import TextStream
from gateway.reasoning import Reasoning, reasoning_of, switch_of, thinks
from gateway.reasoning_text import ReasoningSplitter
from gateway.tokenizer import ModelTokenizer
from gateway.tools.forms import HERMES as HERMES_FORM
from gateway.tools.grammar import call_grammar
from gateway.tools.use import Calls, Function, ToolUse
from tests.gateway.fake_engine import CHAT_TEMPLATE, EOS
from tests.gateway.tool_templates import TEMPLATES, tokenizer_files

BYTE_LEVEL = ModelTokenizer.from_files(tokenizer_files(CHAT_TEMPLATE))
PARTS = (
    "<think>",
    "</think>",
    "<th",
    "ink>",
    "</",
    "<",
    ">",
    " ",
    "\n",
    "\u3000",
    "a",
    "🙂",
    "</think",
    "x y",
)
texts = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def expected(text: str, *, opened: bool) -> tuple[str, str]:
    """The rule, on the whole text at once."""
    marked = re.match(r"\s*<think>", text)
    if not marked and not opened:
        return "", text
    inside, closed, after = text[marked.end() if marked else 0 :].partition("</think>")
    return inside.strip(), after.lstrip() if closed else ""


@given(texts, st.lists(st.integers(0, 60), max_size=6) | st.just(list(range(60))), st.booleans())
@example("<think>\nhm\n</think>\n\nyes", list(range(60)), False)
@example(" \n<think", [1], False)
@example("a </think", [], True)
def test_the_split_is_the_same_wherever_the_text_is_cut(text: str, cuts: list[int], opened: bool) -> None:
    splitter = ReasoningSplitter(opened=opened)
    thought = said = ""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        more_thought, more_said = splitter.feed(text[start:end])
        assert not (said and more_thought), "the thought comes first"
        thought, said = thought + more_thought, said + more_said
        assert 0 <= splitter.consumed <= end
    last_thought, last_said = splitter.finish()
    assert (thought + last_thought, said + last_said) == expected(text, opened=opened)
    assert splitter.consumed == len(text)


@given(texts, st.booleans(), st.sampled_from(["", "a", "x y", " 🙂"]))
def test_every_character_is_told_or_dropped_by_the_end(text: str, opened: bool, stop: str) -> None:
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False)
    splitter = ReasoningSplitter(opened=opened)
    stream = TextStream(BYTE_LEVEL.decoder(), [stop] if stop else [], splitter)
    said = thought = ""
    for token in tokens:
        said += stream.feed(token)
        thought += stream.take_reasoning()
        assert len(said) + len(thought) <= stream.emitted_len <= stream.decoded_len
        if stream.stopped:
            break
    else:
        said += stream.finish()
        thought += stream.take_reasoning()
    whole_thought, whole_said = expected(text, opened=opened)
    assert (thought, said) == (whole_thought, whole_said.partition(stop)[0] if stop else whole_said)
    if stream.stopped:
        assert stream.stop == stop and text[stream.emitted_len :].startswith(stop)
    else:
        assert stream.emitted_len == stream.decoded_len == len(text)


def test_nothing_is_held_back_that_is_certain() -> None:
    splitter = ReasoningSplitter(opened=False)
    pieces = ["<thi", "nk>\n", "We", "ll, ", "a </b", " </thi", "nk>", "\n\n", "So", ": b"]
    got = [splitter.feed(piece) for piece in pieces]
    assert [thought for thought, _ in got] == ["", "", "We", "ll,", " a </b", "", "", "", "", ""]
    assert [said for _, said in got] == [*[""] * 8, "So", ": b"]


def tokenizer(template: str) -> ModelTokenizer:
    return ModelTokenizer.from_files(tokenizer_files(template))


@pytest.mark.parametrize(
    ("end", "opened"),
    [("assistant\n", False), ("<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", None)],
)
def test_a_prompt_may_end_within_the_thought_or_behind_it(end: str, opened: bool | None) -> None:
    own = tokenizer(TEMPLATES["thinking"])
    found = reasoning_of(own, own.encode(f"What is <think>?\n{end}", add_special_tokens=False))
    if opened is None:
        assert found is None
        return
    assert found is not None and found.opened is opened
    assert found.shown == {own.added_token("<think>"), own.added_token("</think>")}


def test_a_message_to_be_continued_says_where_it_ends() -> None:
    own = tokenizer(TEMPLATES["thinking"])
    found = [
        reasoning_of(own, [65], text) for text in ("", "So", "<think>a</think>b", "<think>we", "a<think>")
    ]
    assert [each.opened if each else None for each in found] == [None, None, None, True, True]


def test_templates_say_whether_a_model_thinks_and_how_it_is_told_to() -> None:
    plain = tokenizer(CHAT_TEMPLATE)
    assert reasoning_of(plain, [65]) is None and switch_of(CHAT_TEMPLATE) is None and not thinks(None)
    assert switch_of(TEMPLATES["thinking"]) == "enable_thinking"
    assert thinks("{{ content.split('</think>')[-1] }}") and switch_of("{{ x.split('</think>') }}") is None
    assert switch_of("{% if not thinking is defined %}{% endif %}</think>") == "thinking"
    assert switch_of("{% if x %}thinking</think>{% endif %}") is None, "a word of the text"


WEATHER = Function("weather", None, {"type": "object", "properties": {}, "additionalProperties": False})
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
GRAMMARS = {
    "regex": (LLMatcher.grammar_from_regex("[ab]+"), "aab", "aac"),
    "lark": ('start: "yes" | "no"', "yes", "yet"),
    "schema": ('{"grammars": [{"json_schema": {"type": "array", "maxItems": 0}}]}', "[]", "[1"),
}


@pytest.mark.parametrize("marks", ["tokens", "text"])
@pytest.mark.parametrize("kind", [*GRAMMARS, "calls"])
def test_an_answer_is_held_to_its_form_after_the_thought(marks: str, kind: str) -> None:
    own = tokenizer(TEMPLATES["thinking"])
    engine = LLTokenizer(tokenizer_files("")["tokenizer.json"].decode(), eos_token=EOS)
    if kind == "calls":
        grammar = call_grammar(ToolUse([WEATHER], Calls.REQUIRED), HERMES_FORM, own)
        right, wrong = CALL, CALL.replace("weather", "whether")
    else:
        grammar, right, wrong = GRAMMARS[kind]
    ids = (own.added_token("<think>"), own.added_token("</think>")) if marks == "tokens" else (None, None)
    # Marks that are no tokens are spelled.
    encode = (
        (lambda text: own.encode(text, add_special_tokens=False))
        if marks == "tokens"
        else (
            lambda text: [
                token
                for part in re.split("(<(?=/?think))", text)
                for token in own.encode(part, add_special_tokens=False)
            ]
        )
    )

    def accepts(text: str, *, opened: bool) -> bool:
        matcher = LLMatcher(engine, Reasoning(opened, *ids).before(grammar))
        tokens = encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert LLMatcher.validate_grammar(Reasoning(False, *ids).before(grammar)) == ""
    for answer, fits in ((right, True), (wrong, False)):
        assert accepts(f"<think>\n🙂 well, <b>\n</think>\n\n{answer}", opened=False) is fits
        assert accepts(answer, opened=False) is fits
        assert accepts(f"well\n</think>\n\n{answer}", opened=True) is fits
    assert not accepts(right, opened=True) and not accepts("<think>well", opened=False)
