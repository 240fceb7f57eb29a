"""What an answer must fit: from the fields of a body to the grammar that engines hold it to."""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache
from typing import Any

from gateway.errors import ApiError, invalid_request
from gateway.schema_care import check_multiples, inline_schemas, with_care
from gateway.schemas.structure import Structure, StructureFields

_ANY_OBJECT = {"type": "object"}
# As people and `json.dumps` write it. Free white space would be a way for a model to go on for ever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_LONGEST_FAULT = 400
_MOST_LEXER_FUEL = 100_000
"""What engines give a grammar to begin with: one that needs more is refused here, rather than there."""


async def grammar_of(fields: StructureFields) -> str:
    """Returns the grammar that the answer must fit, as llguidance takes it; "" when it is free.

    Raises ApiError 400 that names the field, and what in it cannot be used.
    """
    asked = fields.structure
    if asked is None:
        return ""
    try:
        return await asyncio.to_thread(_checked, asked)
    except (ValueError, RecursionError) as error:
        raise unusable(asked.param, str(error)) from error


def unusable(param: str, fault: str) -> ApiError:
    """Returns the 400 for a structure that no answer can be held to."""
    fault = " ".join(fault.split())[:_LONGEST_FAULT]
    return invalid_request(f"'{param}' cannot be used: {fault}", param=param, code="invalid_structure")


def lark_grammar(text: str) -> tuple[str, str]:
    """Returns a grammar in Lark as llguidance takes it, and why it cannot be used; "" when it can."""
    from llguidance import LLMatcher  # here, since few need it

    grammar = LLMatcher.grammar_from_lark(text)
    return grammar, _fault_of(grammar)


def schema_fault(schema: dict[str, Any] | bool) -> str:
    """Returns why no answer can be held to a JSON schema; "" when it can."""
    try:
        return _fault_of(_schema(schema))
    except (ValueError, RecursionError) as error:
        return str(error)


def spaced(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Returns a schema as llguidance takes it, which says how JSON is written as well; `true` has no room for
    that. Raises ValueError as `with_care`.
    """
    schema = with_care(schema)
    return schema | {"x-guidance": _SPACING} if isinstance(schema, dict) else schema


def _checked(asked: Structure) -> str:
    """Returns the grammar. Raises ValueError that says why it cannot be used."""
    grammar = _written(asked.kind, asked.value)
    if fault := _fault_of(grammar):
        raise ValueError(fault)
    return grammar


def _written(kind: str, value: Any) -> str:
    """Returns a structure in llguidance's form: a list of one grammar, as JSON."""
    from llguidance import LLMatcher  # here, since few need it

    match kind:
        case "object":
            return _schema(_ANY_OBJECT)
        case "json":
            return _schema(value)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, value)))
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case _:
            grammar = _as_lark(value)
            check_multiples(inline_schemas(grammar))
            return LLMatcher.grammar_from_lark(grammar)


def _schema(schema: dict[str, Any] | bool) -> str:
    return json.dumps({"grammars": [{"json_schema": spaced(schema)}]})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_lark(grammar: str) -> str:
    """Returns a grammar in Lark; llama.cpp's GBNF is known by its arrows."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark  # here, since few need it

    try:
        return gbnf_to_lark(grammar)
    except (GbnfToLarkError, RecursionError) as error:
        raise ValueError(str(error)) from error


@lru_cache(maxsize=1024)
def _fault_of(grammar: str) -> str:
    """Returns why a grammar cannot be used; "" when it can."""
    from llguidance import LLMatcher, LLParserLimits  # here, since not every gateway needs it

    limits = LLParserLimits(initial_lexer_fuel=_MOST_LEXER_FUEL)
    return LLMatcher.validate_grammar(grammar, limits=limits)
