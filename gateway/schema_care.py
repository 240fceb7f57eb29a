"""JSON schemas where llguidance would let something through that does not fit, or take all memory: mended, or
refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import chain
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any] | bool

_DATA = frozenset(("const", "default", "enum", "example", "examples", "required", "type"))
"""Keywords whose values are no schemas, whatever they look like."""
_BY_NAME = frozenset(("$defs", "definitions", "patternProperties", "properties"))
"""Keywords whose values have schemas by name."""
_SECONDS = r":[0-5][0-9](\.[0-9]+)?(Z|[+-][0-9:]+)$"
"""How times end. Hardly anything reads a small z, or leap seconds, which llguidance lets come at any time."""

_MOST_MULTIPLE = 10_000
"""llguidance makes a state for each remainder, all at once, and for each pair of them where two numbers meet:
those of 10,000 take it a tenth of a second and 13 MiB at worst, those of 100,000,000 all memory there is."""
_INLINE = re.compile(r"%json[ \t\r\n]*")


def with_care(schema: Schema) -> Schema:
    """Returns what llguidance can be given for a schema, which stays as it is.

    Raises ValueError that names the keyword which cannot be held to.
    """
    if not isinstance(schema, dict):
        return schema
    check_multiples([schema])
    _check_bounds(schema)
    _check_references(schema)
    return _mended(schema)


def check_multiples(schemas: Iterable[Any]) -> None:
    """Raises ValueError for numbers in `multipleOf` that are too much for one grammar with these schemas.

    They meet by `allOf`, `anyOf` and `$ref`, which may lead anywhere, and those that do not meet add up: so
    all that look like one count. Where they meet, it is by their least common multiple, without the points.
    """
    common = 1
    for number in chain.from_iterable(map(_multiples, schemas)):
        common = math.lcm(common, _digits(number))
        if common > _MOST_MULTIPLE:
            raise ValueError(
                f"multipleOf ({number}) is not supported: without their points, all of them must have "
                f"a least common multiple of at most {_MOST_MULTIPLE:,}"
            )


def inline_schemas(grammar: str) -> Iterator[Any]:
    """Yields the JSON behind each `%json` of a grammar in Lark, wherever one stands: also in a text's or a
    pattern's midst, so that no reading of what is around it can be fooled. Raises ValueError, RecursionError.
    """
    decoder = json.JSONDecoder()
    for found in _INLINE.finditer(grammar):
        try:
            yield decoder.raw_decode(grammar, found.end())[0]
        except json.JSONDecodeError:
            continue  # no schema: llguidance says so where one should be


def _multiples(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        number = value.get("multipleOf")
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            yield number
        value = value.values()
    elif not isinstance(value, list):
        return
    for each in value:
        yield from _multiples(each)


def _digits(number: float) -> int:
    """Returns a number without its point and sign: 15 for -1.5. 1 for zero, which llguidance refuses."""
    _, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    return int("".join(map(str, digits))) * 10 ** max(0, int(exponent)) or 1


def _mended(schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: _mended_any(each) for name, each in value.items()}
        elif key not in _DATA:
            found[key] = _mended_any(value)
        else:
            found[key] = value
    others = found.get("allOf", [])
    if schema.get("format") in ("date-time", "time") and isinstance(others, list):
        found["allOf"] = [*others, {"pattern": _SECONDS}]
    if found.get("uniqueItems") is False:  # says nothing, and would be refused
        del found["uniqueItems"]
    return found


def _mended_any(value: Any) -> Any:
    if isinstance(value, list):
        return [_mended_any(each) for each in value]
    return _mended(value) if isinstance(value, dict) else value


def _check_bounds(schema: dict[str, Any]) -> None:
    """Refuses a whole number that is excluded where the range ends before the next: llguidance lets it in.

    Bounds meet by `allOf` and `$ref` as well, so those of the whole document are looked at.
    """
    bounds = list(_bounds(schema))
    broken = [(key, bound) for key, bound in bounds if bound != math.trunc(bound)]
    ends = {math.floor(bound) for key, bound in broken if key.endswith("aximum")}
    begins = {math.ceil(bound) for key, bound in broken if key.endswith("inimum")}
    for key, bound in bounds:
        if bound in {"exclusiveMinimum": ends, "exclusiveMaximum": begins}.get(key, ()):
            raise ValueError(f"{key} ({bound:g}) with another bound less than 1 away is not supported")


def _check_references(schema: dict[str, Any]) -> None:
    """Refuses references that lead to nothing but themselves: no text would ever be let through."""
    known: set[str] = set()
    for first in _references(schema):
        ref, path = first, set[str]()
        while ref is not None and ref not in known:
            path.add(ref)
            known.add(ref)
            ref = _reference_of(_at(schema, ref))
            if ref in path:
                raise ValueError(f"$ref {ref} leads back to itself")


def _references(value: Any) -> Iterator[str]:
    """Yields the references within the document, of a schema and of all below it."""
    if isinstance(value, dict) and (ref := _reference_of(value)) is not None:
        yield ref
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _references(each)


def _reference_of(value: Any) -> str | None:
    ref = value.get("$ref") if isinstance(value, dict) else None
    return ref if isinstance(ref, str) and ref.startswith("#") else None


def _at(document: Any, ref: str) -> Any:
    """Returns what a JSON pointer leads to; None where it leads nowhere, or is none."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found = document
    for part in unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _bounds(value: Any) -> Iterator[tuple[str, float]]:
    """Yields the bounds of numbers in a schema and in all below it."""
    if isinstance(value, list):
        for each in value:
            yield from _bounds(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            is_bound = key.endswith(("inimum", "aximum"))
            if is_bound and isinstance(each, int | float) and not isinstance(each, bool):
                yield key, each
            elif key not in _DATA:
                yield from _bounds(each)
