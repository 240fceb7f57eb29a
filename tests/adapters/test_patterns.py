from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.patterns import MAX_PATTERN_CHARS, Budget, Pattern, UnsafePattern

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.1.self_attn.v_proj",
    "lm_head",
]
# As Unsloth writes it.
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|gate_proj)))"
)


@pytest.mark.parametrize(
    "text",
    [
        UNSLOTH,
        r".*\.(q|v)_proj",
        r"model\.layers\.([0-9]|1[01])\.mlp\..*",
        r"(?!.*mlp).*_proj",
        r"(?=.*mlp).*_proj$",
        r"^model\..*",
        r".*q_proj|lm_head",
        r"[^l]\w+\.\w+\.\d{2}\.\S+",
        r"(a*)*b",
        r"(?P<x>m)odel.+",
        r"\W*\w+",
        r".{3,8}",
        r"\Alm_head\Z",
        r"",
    ],
)
def test_matches_as_re_does(text: str) -> None:
    for name in NAMES:
        assert Pattern(text, Budget()).matches_whole(name) == (re.fullmatch(text, name) is not None), name
        assert Pattern(text, Budget()).matches_suffix(name) == (
            re.match(rf"(.*\.)?({text})$", name) is not None
        ), name


_atoms = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", "^", "$", r"\b", r"\B"])
_regexes = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{2,}", "{0}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda text: f"(?={text})"),
        inner.map(lambda text: f"(?!{text})"),
    ),
    max_leaves=6,
)


@settings(max_examples=600, deadline=None)
@given(_regexes, st.text(alphabet="ab.1", min_size=1, max_size=7))
def test_matches_as_re_does_on_random_expressions(text: str, name: str) -> None:
    assert Pattern(text, Budget()).matches_whole(name) == (re.fullmatch(text, name) is not None)
    assert Pattern(text, Budget()).matches_suffix(name) == (re.match(rf"(.*\.)?({text})$", name) is not None)


@pytest.mark.parametrize(
    "text",
    [r"(a+)+$", r"(a|a)*$", r"(.*.*)*x", r"((((a*)*)*)*)*b", r"(?:(?:a?){30}){30}b", r"(?:){4294967290}b"],
)
def test_what_hangs_re_ends_soon(text: str) -> None:
    begun = time.process_time()
    try:
        Pattern(text, Budget()).matches_whole("a" * 60 + "!")
    except UnsafePattern as error:
        assert "too costly" in str(error)
    assert time.process_time() - begun < 20


WIDE = "".join(chr(0x10000 + 2 * number) for number in range(4000))
"""Characters for a set, no two of them neighbours."""


@pytest.mark.parametrize(
    "text",
    [f".*[{WIDE}]", f".*[^{WIDE}]x", f"[{WIDE}]", ".*(?:" + "|" * 4000 + ")", "(?:(?:" + "|" * 4000 + ").)*"],
    ids=["set", "negated set", "plain set", "branches", "branches in a repeat"],
)
def test_what_a_node_tries_one_by_one_is_paid_one_by_one(text: str) -> None:
    budget = Budget()
    pattern = Pattern(text, budget)
    begun = time.process_time()
    with pytest.raises(UnsafePattern, match="too costly"):
        while time.process_time() - begun < 10:
            pattern.matches_suffix(NAMES[0])


def test_expressions_of_many_sets_are_read_at_once() -> None:
    sets = "[\u0400\u4e04\u9e0a]" * 800
    begun = time.process_time()
    for number in range(100):
        Pattern(f"{number}{sets}", Budget())
    assert time.process_time() - begun < 2


def test_a_config_may_say_something_of_each_module() -> None:
    names = [
        f"model.layers.{layer}.{part}" for layer in range(80) for part in ("mlp.up_proj", "self_attn.q_proj")
    ]
    budget = Budget()
    for text in (
        *names,
        UNSLOTH,
        r"model\.layers\.[0-9a-z_]+\.[a-z_]+\.[a-z]_[a-z_]*proj",
        r".*[qkvo]_proj",
        r"layers\.[0-9]\.mlp\.up_proj",
    ):
        pattern = Pattern(text, budget)
        assert any([pattern.matches_suffix(name) for name in names]), text


def test_a_count_that_no_name_reaches_costs_nothing() -> None:
    budget = Budget(100)
    assert not Pattern("(?:model){4000000000}", budget).matches_whole(NAMES[0])


def test_the_budget_is_one_for_all_patterns() -> None:
    budget = Budget(1000)
    with pytest.raises(UnsafePattern, match="too costly"):
        for _ in range(1000):
            Pattern("q_proj", budget).matches_suffix(NAMES[0])
            Pattern(".*_proj", budget).matches_suffix(NAMES[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(", "not a regular expression"),
        ("[a", "not a regular expression"),
        ("(?i)a", "inline flags"),
        ("(?i:a)", "inline flags"),
        (r"(a)\1", "not supported"),
        (r"(?<=a)b", "not supported"),
        ("(?>a*)b", "not supported"),
        ("a)|(b", "not a regular expression"),
        ("(" * 3000 + ")" * 1000, "not a regular expression|longer"),
        ("a" * (MAX_PATTERN_CHARS + 1), "longer than"),
    ],
)
def test_refuses_what_it_cannot_do(text: str, message: str) -> None:
    with pytest.raises(UnsafePattern, match=message):
        Pattern(text, Budget()).matches_whole("aaab")
