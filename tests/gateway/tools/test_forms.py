"""The forms of calls that templates teach, found in time that follows the template's length."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.reasoning import switch_of
from gateway.template_words import in_tag
from gateway.tools.forms import LLAMA, form_of

LONG = 1_000_000
"""Characters; four times what an adapter's template may have."""
PARTS = ("{", "%", "}", "{{", "{%", "tools", " ", "x", "_", "\n", "x" * 98, "x" * 99)


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
@example("{{{% tools")
@example("{{ {% tools")
@example("{{{{" + "x" * 197 + " tools")
@example("{{" + " " * 200 + "tools")
@example("{{" + " " * 201 + "tools")
@example("{{ } tools")
def test_a_word_in_a_tag_is_found_as_by_the_plain_rule(template: str) -> None:
    expected = re.search(r"\{[%{][^%}]{0,200}?\btools\b", template)
    assert in_tag(template, "tools") == (expected is not None)


@given(st.lists(st.sampled_from(('"name":', '"parameters":', '"', "x" * 99)), max_size=8).map("".join))
def test_llama_s_call_is_found_as_by_the_plain_rule(text: str) -> None:
    expected = re.search(r'"name":.{0,200}?"parameters":', text, re.DOTALL)
    assert (form_of("{{ tools }}" + text) is LLAMA) == (expected is not None)


@pytest.mark.parametrize(
    ("piece", "length"),
    [
        ("{", LONG),
        ("{{a", LONG),
        ("{{{" + "a" * 198, LONG),
        ("{%" + "{ " * 99, LONG),
        ('"name":', 10 * LONG),
        ('"name":' + "x" * 199, 10 * LONG),
    ],
)
def test_a_template_is_read_in_time_that_follows_its_length(piece: str, length: int) -> None:
    template = "</think>" + piece * (length // len(piece))
    begun = time.process_time()
    assert form_of(template) is None and switch_of(template) is None
    assert form_of("{{ tools }}" + template) is None
    assert time.process_time() - begun < 1.5
    form_of.cache_clear()
    switch_of.cache_clear()
