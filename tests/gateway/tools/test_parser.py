"""Reading calls: what is one, what is text, and that it does not matter how an answer is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tools.forms import HERMES, LLAMA, MISTRAL, CallForm
from gateway.tools.parser import CallArguments, CallBegin, CallParser, Event, Text

FORMS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
NAMES = ("f", "get_weather")
Read = tuple[str, list[tuple[str, str]]]


def joined(events: list[Event]) -> Read:
    """The text of an answer, and its calls' names and arguments."""
    text, calls = "", []
    for event in events:
        match event:
            case Text():
                assert event.text
                text += event.text
            case CallBegin():
                assert event.index == len(calls)
                calls.append((event.name, ""))
            case CallArguments():
                assert event.text and event.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return text, calls


def read(form: CallForm, *pieces: str) -> Read:
    parser = CallParser(form, NAMES)
    events = [event for piece in pieces for event in parser.feed(piece)]
    found = joined(events + parser.finish())
    json.dumps(found, ensure_ascii=False).encode()  # can be sent
    assert parser.calls == len(found[1])
    return found


HI = '{"name": "f", "arguments": {"a": "}</tool_call>\\"{"}}'
LONG = '{"name": "get_weather", "arguments": {"place": {"city": "日本 🙂"}, "days": [1, 2]}}'
F, W = ("f", '{"a": "}</tool_call>\\"{"}'), ("get_weather", '{"place": {"city": "日本 🙂"}, "days": [1, 2]}')

CASES: list[tuple[CallForm, str, str, list[tuple[str, str]]]] = [
    (HERMES, "just text", "just text", []),
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, " text \n", " text \n", []),
    (HERMES, f"<tool_call>\n{HI}\n</tool_call>", "", [F]),
    (HERMES, f"Let me see.\n<tool_call>\n{HI}\n</tool_call>\n", "Let me see.", [F]),
    (HERMES, f"<tool_call>\n{HI}\n</tool_call>\n<tool_call>{LONG}</tool_call>", "", [F, W]),
    (HERMES, f"<tool_call>{HI}</tool_call>\nDone <b>", "\nDone <b>", [F]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}, "id": "}"}</tool_call>', "", [("other", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": {"x": [1]}}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": </tool_call>!', "!", [("f", '{"a": ')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}</tool_call> so', " so", [("f", "{}")]),
    (HERMES, f"<tool_call>{HI}\n</tool_c", "", [F]),
    (HERMES, '\n<tool_call>{"nam', '\n<tool_call>{"nam', []),
    (
        HERMES,
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}',
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}',
        [],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}', "", [("f", '{"a": "\\ud800"}')]),
    (HERMES, "<tool_call>no {} </tool_call>", "<tool_call>no {} </tool_call>", []),
    (HERMES, "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    (HERMES, '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    (HERMES, f"<tool_call> or <tool_call>{HI}</tool_call>", "<tool_call> or", [F]),
    (MISTRAL, f"[TOOL_CALLS] [{HI}, {LONG}]", "", [F, W]),
    (MISTRAL, f"[TOOL_CALLS][{HI}]\n", "", [F]),
    (MISTRAL, f"So: [TOOL_CALLS][{HI}] [1]", "So: [1]", [F]),
    (MISTRAL, f"[TOOL_CALLS] [no[TOOL_CALLS] [{HI}]", "[TOOL_CALLS] [no", [F]),
    (MISTRAL, "[TOOL_CALLS] {}", "[TOOL_CALLS] {}", []),
    (MISTRAL, "[TOOL_CALLS] [[]]", "[TOOL_CALLS] [[]]", []),
    (MISTRAL, "[TOOL_ or not", "[TOOL_ or not", []),
    (MISTRAL, f"[TOOL_CALLS] [{HI}", "", [F]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA, '\n<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {}}',
        "",
        [("f", "{}"), ("get_weather", "{}")],
    ),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA, '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    (LLAMA, '{"answer": {"name": 1}}', '{"answer": {"name": 1}}', []),
    (LLAMA, '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
    (LLAMA, 'I say {"name": "f", "parameters": {}}', 'I say {"name": "f", "parameters": {}}', []),
    (LLAMA, '{"name": "f", "parameters": {}}\n\nDone.', "\n\nDone.", [("f", "{}")]),
]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_an_answer_is_read(form: CallForm, answer: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert read(form, answer) == (text, calls)
    assert read(form, *answer) == (text, calls)


PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[",
        "]",
        "{",
        "}",
        ",",
        ";",
        ":",
        '"',
    ),
    *("\\", "\n", " ", "<", "日", "a", '"name": "f"', '"name": "Ann"', '"arguments": {', '"parameters": {'),
    *('\\ud800"', '"name": "\\udfff"', HI, LONG, HI.replace("arguments", "parameters"), '"type"'),
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(st.sampled_from(PARTS), max_size=14).map("".join),
    st.lists(st.integers(0, 300), max_size=12),
)
def test_it_does_not_matter_how_an_answer_is_cut(name: str, answer: str, cuts: list[int]) -> None:
    form = FORMS[name]
    at = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    pieces = [answer[start:end] for start, end in itertools.pairwise(at)]
    assert read(form, *pieces) == read(form, answer) == read(form, *answer)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.text(st.characters(codec="utf-8", exclude_characters="<[{"), max_size=20),
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.dictionaries(
                st.text(max_size=5),
                st.recursive(
                    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
                    max_leaves=6,
                ),
                max_size=4,
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_what_is_written_is_read(
    name: str, text: str, calls: list[tuple[str, dict[str, object]]], readable: bool
) -> None:
    form = FORMS[name]
    text = "" if form.bare else text.rstrip()
    written = [
        json.dumps({"name": function, form.arguments: arguments}, ensure_ascii=not readable)
        for function, arguments in calls
    ]
    if form.listed:
        answer = f"{form.marker} [{', '.join(written)}]"
    elif form.bare:
        answer = "; ".join(written)
    else:
        answer = "\n".join(f"{form.marker}\n{each}\n{form.closing}" for each in written)
    found_text, found = read(form, *f"{text}\n{answer}")
    assert found_text == text
    assert [(function, json.loads(arguments)) for function, arguments in found] == calls


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_only_what_may_be_a_marker_is_held_back(form: CallForm) -> None:
    parser = CallParser(form, NAMES)
    assert joined(parser.feed("Hello")) == ("Hello", [])
    assert joined(parser.feed(" ") + parser.feed("there")) == (" there", [])
    if not form.bare:
        assert parser.feed(form.marker[:-1]) == []
        assert joined(parser.feed("!")) == (form.marker[:-1] + "!", [])


def test_an_answer_in_json_is_not_held_back() -> None:
    parser = CallParser(LLAMA, NAMES)
    assert parser.feed('{ "n') == []
    assert joined(parser.feed('ot": {')) == ('{ "not": {', [])


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.feed('Now\n<tool_call>{"name": "f", "arguments":') == [Text("Now")]
    assert parser.feed(' {"a": "') == [CallBegin(0, "f"), CallArguments(0, '{"a": "')]
    assert parser.feed("b") == [CallArguments(0, "b")]
    assert parser.feed('"}') == [CallArguments(0, '"}')]
    assert parser.feed("}\n</tool_call>") == parser.finish() == []
