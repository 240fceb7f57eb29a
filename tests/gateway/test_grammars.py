"""From a body's fields to a grammar: what it lets through, and how what cannot be used is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError

from gateway.errors import ApiError
from gateway.grammars import grammar_of
from gateway.schemas.chat import ChatRequest
from tests.gateway.fake_engine import EOS, TOKENIZER_FILES

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

LARGE = '{"type": "integer", "multipl\\u0065Of": 1000003}'


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER_FILES["tokenizer.json"].decode(), eos_token=EOS)


def body(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(
        {"model": "base", "messages": [{"role": "user", "content": "?"}], **fields}
    )


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def fits(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"response_format": json_schema(SCHEMA)},
            ['{"a": 1}', '{"a": -20}'],
            ['{"a": "1"}', "{}", '{"a":1}'],
        ),
        ({"response_format": json_schema(SCHEMA, strict=False)}, ['{"a": 1}'], ["{}"]),
        ({"response_format": json_schema(True)}, ["[1]", '"x"'], ["x"]),
        ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, {}]}'], ["[]", "1", "{"]),
        ({"guided_json": {"enum": ["a/b", "c"]}}, ['"a/b"'], ['"b"']),
        ({"guided_regex": r"[a-c]{2}/\d+\n"}, ["ab/1\n", "cc/23\n"], ["ab/1", "abc/1\n"]),
        ({"guided_choice": ['say "hi"', "ja\\nein", "→"]}, ['say "hi"', "ja\\nein", "→"], ["say", "ja\nein"]),
        ({"guided_grammar": 'start: "a" b\nb: "b"+'}, ["ab", "abb"], ["a"]),
        ({"guided_grammar": 'root ::= "a" [0-9]+'}, ["a1"], ["a"]),
        ({"guided_grammar": 'start: %json {"type": "integer", "multipleOf": 9973}'}, ["9973"], ["9974"]),
    ],
)
async def test_an_answer_fits_or_not(
    tokenizer: LLTokenizer, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = await grammar_of(body(**fields))
    assert [text for text in good if not fits(tokenizer, grammar, text)] == []
    assert [text for text in bad if fits(tokenizer, grammar, text)] == []


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_regex": None}])
async def test_free_text_has_no_grammar(fields: dict[str, Any]) -> None:
    assert await grammar_of(body(**fields)) == ""


@pytest.mark.parametrize(
    ("fields", "param", "fault"),
    [
        (json_schema({"type": "strin"}), "response_format.json_schema.schema", "Invalid type: strin"),
        (json_schema({"not": {}}), "response_format.json_schema.schema", "not"),
        (json_schema({"format": "time", "allOf": 5}), "response_format.json_schema.schema", "allOf"),
        (json_schema({"$ref": "#/none"}), "response_format.json_schema.schema", "/none"),
        (json_schema({"$ref": "http://127.0.0.1/x"}), "response_format.json_schema.schema", "127.0.0.1"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: b"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", ""),
        ({"guided_grammar": f"start: a\na: %json\n {LARGE}"}, "guided_grammar", "multipleOf (1000003)"),
        ({"guided_grammar": f'start: "%json " %json {LARGE} "'}, "guided_grammar", "multipleOf (1000003)"),
        ({"guided_grammar": f'start: /%json [/ %json {LARGE} "]"'}, "guided_grammar", "multipleOf (1000003)"),
        (
            {"guided_grammar": 'start: %json {"multipleOf": 97} | %json {"multipleOf": 1009}'},
            "guided_grammar",
            "multipleOf (1009)",
        ),
    ],
)
async def test_what_cannot_be_used_is_refused_with_the_reason(
    fields: dict[str, Any], param: str, fault: str
) -> None:
    request = body(response_format=fields) if "json_schema" in fields else body(**fields)
    with pytest.raises(ApiError) as refused:
        await grammar_of(request)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert fault in refused.value.message


async def test_two_structures_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="it excludes 'guided_regex'"):
        body(guided_regex="a", response_format={"type": "json_object"})


async def test_a_schema_without_a_schema_is_any_object() -> None:
    wanted = await grammar_of(body(response_format={"type": "json_object"}))
    assert await grammar_of(body(response_format=json_schema(None))) == wanted
    assert json.loads(wanted)["grammars"][0]["json_schema"]["type"] == "object"
