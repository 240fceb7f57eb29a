"""A thousand random JSON schemas: whatever is drawn under one, once it is whole, is valid under it.

Validity is what the `jsonschema` package says. Schemas nest, refer to each other, and have every keyword that
can be held to; texts are drawn token by token, at random, from what is allowed.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker

from engine.constraints import Grammar, Grammars
from gateway.grammars import grammar_of
from gateway.schemas.chat import ChatRequest
from tests.gateway.fake_engine import EOS, TOKENIZER_FILES, VOCAB_SIZE, make_tokenizer

NUM_SCHEMAS = 1000
MOST_TOKENS = 400
NAMES = ["a", "b", "name", "w1", "日本", 'say "x"', "a/b"]
CLOSERS = {'"', "}", "]", ","}
FORMATS = ["date", "uuid", "ipv4", "email"]


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
        kinds = [self._string, self._number, self._constant, self._reference]
        if depth:
            kinds += [self._object, self._object, self._array, self._choice, self._all]
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


async def test_whatever_is_drawn_is_valid(grammars: Grammars) -> None:
    schemas, drawer, num_whole = Schemas(1), Drawer(2), 0
    for _ in range(NUM_SCHEMAS):
        schema = schemas.document()
        text = drawer.text(grammars.understand(await grammar_for(schema)))
        if text is not None:
            checker = Draft202012Validator(schema, format_checker=FormatChecker())
            faults = [fault.message for fault in checker.iter_errors(json.loads(text))]
            assert not faults, (schema, text, faults)
            num_whole += 1
    assert num_whole > 0.95 * NUM_SCHEMAS
