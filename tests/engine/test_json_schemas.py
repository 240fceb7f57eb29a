"""A thousand random JSON schemas, and one for each keyword: whatever is drawn under one, once it is whole, is
valid under it, and what cannot be held to is refused by its name.

Validity is what the `jsonschema` package says. Schemas nest, refer to each other, and have every keyword that
can be held to; texts are drawn token by token, at random, from what is allowed.
"""

from __future__ import annotations

import json
import random
from datetime import datetime, time
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher

from engine.constraints import Grammar, Grammars, InvalidGrammar
from gateway.errors import ApiError
from gateway.grammars import grammar_of
from gateway.schema_care import with_care
from gateway.schemas.chat import ChatRequest
from tests.gateway.fake_engine import EOS, TOKENIZER_FILES, VOCAB_SIZE, make_tokenizer

NUM_SCHEMAS = 1000
MOST_TOKENS = 400
NAMES = ["a", "b", "name", "w1", "日本", 'say "x"', "a/b"]
CLOSERS = {'"', "}", "]", ","}
FORMATS = ["date", "date-time", "time", "duration", "uuid", "ipv4", "ipv6", "email", "hostname"]
LEAF = {"leaf": {"type": "integer", "minimum": 0, "maximum": 99}}
HELD: list[Any] = [
    {},
    True,
    {"type": ["integer", "null"], "minimum": 2, "maximum": 40},
    {"minimum": 3},
    {"items": {"const": 1}, "maxItems": 3},
    {"const": {"b": 1, "a": [1, {"x": None}]}},
    {"enum": ["a", "bb", "ccc"], "minLength": 2},
    {"enum": [1, 5, 9], "minimum": 4},
    {"enum": [[1], [1, 2]], "minItems": 2},
    {"enum": [{"a": 1}, {"a": 2}], "properties": {"a": {"minimum": 2}}},
    {"enum": [1, 2, 3, 4], "multipleOf": 2},
    {"type": "integer", "multipleOf": 1.5, "minimum": 0, "maximum": 90},
    {"type": "number", "multipleOf": 0.125, "minimum": 0, "maximum": 1},
    {"type": "integer", "exclusiveMinimum": 1.5, "maximum": 3},
    {"type": "number", "minimum": -0.5, "maximum": -0.25},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "string", "pattern": "a", "maxLength": 5},
    {"type": "string", "pattern": "^a|b$", "maxLength": 5},
    {"type": "string", "pattern": "^[^x]{2}$"},
    {"type": "string", "format": "date", "pattern": "^2"},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 2},
    {"type": "array", "items": False},
    {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": False},
    {"type": "object", "properties": {"a": False, "b": {"const": 1}}, "additionalProperties": False},
    {"type": "object", "required": ["z"], "properties": {"a": {}}, "additionalProperties": {"const": 2}},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2, "maxProperties": 3},
    {"properties": {"a": {}}, "patternProperties": {"^a": {"type": "string", "minLength": 3}}},
    {"properties": {"$ref": {"const": 1}, "format": {"const": "date-time"}}, "required": ["$ref", "format"]},
    {"properties": {"const": {"type": "string", "format": "time"}}, "required": ["const"]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]},
    {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string", "maxLength": 6},
    {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
    {"allOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"anyOf": [{"const": 2}, {"const": 3}]}]},
    {"allOf": [True, {"const": 1}], "anyOf": [False, {"type": "integer"}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 0, "maximum": 10}]},
    {"oneOf": [False, {"const": 1}]},
    {"$ref": "#/$defs/leaf", "minimum": 50, "$defs": LEAF},
    {"$ref": "#/definitions/leaf", "definitions": LEAF},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}},
    {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "const": 1}}},
    {"$id": "http://example.com/y", "$ref": "#/$defs/leaf", "$defs": LEAF},
    {"$comment": "a", "title": "b", "description": "c", "default": 1, "examples": [2], "const": 3},
]
"""Schemas that answers can be held to, keyword by keyword, with what they meet."""
REFUSED = [
    ({"not": {"const": 1}}, "not"),
    ({"if": {"const": 1}, "then": {"const": 1}, "else": {}}, "if"),
    ({"contains": {"const": 1}}, "contains"),
    ({"minContains": 2}, "minContains"),
    ({"maxContains": 2}, "maxContains"),
    ({"uniqueItems": True}, "uniqueItems"),
    ({"type": "integer", "multipleOf": 99_999_989}, "multipleOf (99999989)"),
    ({"type": "number", "multipleOf": -1000.3}, "multipleOf (-1000.3)"),
    ({"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 10.9}]}, "multipleOf (10.9)"),
    (
        {"anyOf": [{"type": "integer", "multipleOf": number} for number in (307, 310, 311)]},
        "multipleOf (310)",
    ),
    ({"$ref": "#/examples/0", "examples": [{"type": "integer", "multipleOf": 10_007}]}, "multipleOf (10007)"),
    ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependentSchemas": {"a": {}}}, "dependentSchemas"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"unevaluatedItems": False}, "unevaluatedItems"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
    ({"$ref": "http://example.com/other"}, "example.com/other"),
    ({"$ref": "#/$defs/none"}, "/$defs/none"),
    ({"$ref": "#"}, "$ref # leads back to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "leads back"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
    ({"properties": {"a": {}}, "minProperties": 1}, "min/maxProperties"),
    ({"patternProperties": {"^x": {}, "y$": {}}}, "not disjoint"),
    ({"type": "string", "format": "uri-template"}, "format: uri-template"),
    ({"type": "string", "pattern": "^(?=a)"}, "look-ahead"),
    ({"type": "string", "pattern": "a\\b"}, "regex"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum (5) is greater than maximum (4)"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum (0)"),
    ({"allOf": [{"exclusiveMaximum": 0}, {"type": "number", "minimum": -0.5}]}, "exclusiveMaximum (0)"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "incompatible types"),
    ({"enum": []}, "empty"),
    ({"type": "any"}, "any"),
]
"""Schemas that no answer can be held to, and what must be said of each."""


class Schemas:
    """Makes random schemas that something fits."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def document(self) -> dict[str, Any]:
        """One with definitions, which may refer to themselves where that can end."""
        rng = self._rng
        tree = {
            "type": "object",
            "properties": {"value": self.schema(1), "next": {"$ref": "#/$defs/tree"}},
            "required": ["value"],
            "additionalProperties": False,
        }
        return self.schema(3) | {"$defs": {"leaf": self.schema(0), "tree": tree}, "title": f"t{rng.random()}"}

    def schema(self, depth: int) -> dict[str, Any]:
        kinds = [self._string, self._number, self._multiple, self._constant, self._reference]
        if depth:
            kinds += [self._object, self._object, self._map, self._array, self._choice, self._one, self._all]
        return self._rng.choice(kinds)(depth)

    def _string(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        least = rng.randrange(4)
        return rng.choice(
            [
                {"type": "string", "minLength": least, "maxLength": least + rng.randrange(6)},
                {
                    "type": "string",
                    "pattern": rng.choice([r"^[A-Z]{2}-\d{1,3}$", "^(ja|nein)$", r"^\w{1,4}$"]),
                },
                {"type": "string", "format": rng.choice(FORMATS)},
            ]
        )

    def _number(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        low = rng.randrange(-50, 50)
        kind = rng.choice(["integer", "number"])
        bounds = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        return {"type": kind, bounds[0]: low, bounds[1]: low + rng.randrange(2, 200)}

    def _multiple(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kind = rng.choice([("integer", rng.randrange(1, 9)), ("number", 0.5), ("number", 0.25)])
        return {"type": kind[0], "multipleOf": kind[1], "minimum": 0, "maximum": rng.randrange(20, 200)}

    def _map(self, depth: int) -> dict[str, Any]:
        least = self._rng.randrange(3)
        return {
            "type": "object",
            "additionalProperties": self.schema(0),
            "minProperties": least,
            "maxProperties": least + self._rng.randrange(3),
        }

    def _one(self, depth: int) -> dict[str, Any]:
        """Of what is told apart by its type, or by a property."""
        rng = self._rng
        kinds = [
            {"type": "object", **self._map(depth)},
            {"type": "boolean"},
            self._string(depth),
            self._number(depth),
        ]
        if rng.random() < 0.5:
            return {"oneOf": rng.sample(kinds, rng.randrange(1, 4))}
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": name}, name: self.schema(depth - 1)},
                    "required": ["kind", name],
                    "additionalProperties": False,
                }
                for name in rng.sample(NAMES, 2)
            ]
        }

    def _constant(self, depth: int) -> dict[str, Any]:
        values = [None, True, False, 0, -1.5, "w1", "日本", {"a": [1, "x"]}, [], ["a", None]]
        rng = self._rng
        if rng.random() < 0.3:
            return {"const": rng.choice(values)}
        return {"enum": rng.sample(values, rng.randrange(1, 4))}

    def _reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": "#/$defs/tree" if depth > 2 else "#/$defs/leaf"} if depth else {"type": "boolean"}

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(NAMES, rng.randrange(1, 4))
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.schema(depth - 1) for name in names},
            "required": rng.sample(names, rng.randrange(len(names) + 1)),
        }
        rest = rng.choice([False, False, {"type": "boolean"}])
        if rest is False and rng.random() < 0.3:
            found["patternProperties"] = {"^x[0-9]$": self.schema(0)}
        return found | {"additionalProperties": rest}

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        least = rng.randrange(3)
        found: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + rng.randrange(3)}
        if rng.random() < 0.3:
            found["prefixItems"] = [self.schema(depth - 1) for _ in range(rng.randrange(1, 3))]
        return found | {"items": self.schema(depth - 1)}

    def _choice(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth - 1) for _ in range(self._rng.randrange(1, 4))]}

    def _all(self, depth: int) -> dict[str, Any]:
        low = self._rng.randrange(-50, 50)
        if low % 2:
            first, second = self.schema(0), self.schema(0)
            one = {"type": "object", "properties": {"a": first}, "required": ["a"]}
            other = {"properties": {"b": second}, "required": ["b"]}
            return {"allOf": [one, other], "additionalProperties": True}
        return {"allOf": [{"type": "integer", "minimum": low, "maximum": low + 9}, {"minimum": low + 4}]}


class Drawer:
    """Draws texts at random, so that they come to an end."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = make_tokenizer()
        vocab = self._tokenizer.get_vocab()
        self._closers = {token for text, token in vocab.items() if text in CLOSERS} | {EOS}

    def text(self, grammar: Grammar) -> str | None:
        """A whole text that the grammar allows, or None when it became too long."""
        constraint, tokens = grammar.start(), []
        words = np.zeros(constraint.num_words, np.int32)
        while not constraint.is_complete:
            constraint.write_allowed(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
            assert allowed, (constraint.fault, self._tokenizer.decode(tokens))
            ends = [token for token in allowed if token in self._closers]
            token = self._rng.choice(ends if ends and self._rng.random() < 0.6 else allowed)
            constraint.take(token)
            tokens.append(token)
            if len(tokens) > MOST_TOKENS:
                return None
        assert not constraint.fault
        return self._tokenizer.decode([token for token in tokens if token != EOS])


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER_FILES["tokenizer.json"].decode(), VOCAB_SIZE, [EOS])


async def grammar_for(schema: dict[str, Any]) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "response_format": form}
    return await grammar_of(ChatRequest.model_validate(body))


def assert_valid(schema: Any, text: str) -> None:
    formats = FormatChecker()
    # The package takes no offset beyond twelve hours.
    formats.checkers = formats.checkers | {
        "date-time": (lambda value: bool(datetime.fromisoformat(value)), ValueError),
        "time": (lambda value: time.fromisoformat(value) is not None, ValueError),
    }
    checker = Draft202012Validator(schema, format_checker=formats)
    faults = [fault.message for fault in checker.iter_errors(json.loads(text))]
    assert not faults, (schema, text, faults)


async def test_whatever_is_drawn_is_valid(grammars: Grammars) -> None:
    schemas, drawer, num_whole = Schemas(1), Drawer(2), 0
    for _ in range(NUM_SCHEMAS):
        schema = schemas.document()
        text = drawer.text(grammars.understand(await grammar_for(schema)))
        if text is not None:
            assert_valid(schema, text)
            num_whole += 1
    assert num_whole > 0.95 * NUM_SCHEMAS


@pytest.mark.parametrize("schema", HELD, ids=json.dumps)
async def test_an_answer_is_held_to_each_keyword(grammars: Grammars, schema: Any) -> None:
    grammar, drawer = grammars.understand(await grammar_for(schema)), Drawer(3)
    texts = [drawer.text(grammar) for _ in range(12)]
    whole = [text for text in texts if text is not None]
    for text in whole:
        assert_valid(schema, text)
    assert len(whole) > 6


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=str)
async def test_what_cannot_be_held_to_is_refused_by_its_name(schema: dict[str, Any], says: str) -> None:
    """Wherever it stands."""
    for whole in (schema, {"type": "object", "properties": {"a": {"anyOf": [schema]}}, "required": ["a"]}):
        if "'#" in str(whole) and whole is not schema:
            continue  # its references are from the document's root
        with pytest.raises(ApiError) as refused:
            await grammar_for(whole)
        message = refused.value.message
        assert refused.value.status == 400
        assert says in message or (whole is not schema and "Unsatisfiable" in message)
        assert refused.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("count", [1_000, 9_000, 9_500, 10_000, 10_500, 11_000, 30_000])
async def test_a_schema_that_is_too_big_for_an_engine_is_refused_before(
    grammars: Grammars, count: int
) -> None:
    schema = {"enum": list(range(count))}
    try:
        grammars.understand(LLMatcher.grammar_from_json_schema(schema))
    except InvalidGrammar:
        assert count > 1_000
        with pytest.raises(ApiError, match="too big"):
            await grammar_for(schema)
    else:
        assert count < 30_000
        await grammar_for(schema)


async def test_a_schema_is_not_changed_by_the_care_that_is_taken_of_it() -> None:
    schema = {"properties": {"a": {"format": "time"}}, "uniqueItems": False, "enum": [{"format": "time"}]}
    before = json.dumps(schema)
    found = with_care(schema)
    assert json.dumps(schema) == before
    assert isinstance(found, dict) and found["enum"] == schema["enum"] and "uniqueItems" not in found
    assert found["properties"]["a"]["allOf"]
