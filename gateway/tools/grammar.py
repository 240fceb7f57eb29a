"""What an answer with tools must fit, as a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from gateway.grammars import spaced
from gateway.tools.forms import CallForm
from gateway.tools.use import Calls, Function, ToolUse

Schema = dict[str, Any] | bool
TokenOf = Callable[[str], int | None]

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANYTHING = r"/(.|\n)*/"


def call_grammar(
    use: ToolUse,
    form: CallForm,
    *,
    token_of: TokenOf,
    end_tokens: Sequence[int] = (),
    content: Schema | None = None,
) -> str:
    """Returns the grammar in Lark; "" when answers are free.

    They are held where a call is required, where a function that may be called is strict, where only one call
    may come, and where `content`, a schema, says what an answer without calls must fit. `token_of` knows the
    markers that are single tokens, which no text can spell; `end_tokens` may end a whole answer, beside the
    model's own.
    """
    functions = use.callable
    held = content is not None or not use.parallel or any(each.strict for each in functions)
    if not functions or not (held or use.calls is Calls.REQUIRED):
        return ""
    marker = _marker(form.marker, token_of)
    rules = [_calls_rule(use, form, token_of), *_call_rules(use, form)]
    if use.calls is Calls.REQUIRED:
        start = f"{marker}? calls" if form.bare else f"{marker} calls"
    elif content is not None:
        start = f"content | {marker}? calls" if form.bare else f"content | {marker} calls"
        rules.append(f"content: %json {json.dumps(spaced(content))}")
    elif form.bare:
        start = f"TEXT? | {marker}? calls"
        rules.append(r"TEXT: /[^{<\s](.|\n)*/")
    else:
        # What is text holds no call, so that none escapes its schema.
        literal = json.dumps(form.marker)
        start = "TEXT? | begin calls" if token_of(form.marker) is None else f"TEXT? | TEXT? {marker} calls"
        rules += [
            f"begin[lazy]: {_ANYTHING} {literal}",
            r"TEXT: /(.|\n)+/ & ~CALL",
            f"CALL: {_ANYTHING} {literal} {_ANYTHING}",
        ]
    if end_tokens:
        start = f"({start}) end?"
        rules.append("end: " + " | ".join(f"<[{token}]>" for token in end_tokens))
    return "\n".join([f"start: {start}", *rules])


def arguments_schema(function: Function, use: ToolUse) -> dict[str, Any]:
    """Returns what a function's arguments are held to where any are."""
    if use.calls is not Calls.REQUIRED and not function.strict:
        return _ANY_OBJECT
    return _NO_ARGUMENTS if function.parameters is None else _ANY_OBJECT | function.parameters


def _calls_rule(use: ToolUse, form: CallForm, token_of: TokenOf) -> str:
    """What follows the first marker."""
    one = use.one_call or form.single
    if form.listed:
        return 'calls: " "? "[" call "]"' if one else 'calls: " "? "[" call (", " call)* "]"'
    if form.bare:
        return "calls: call"
    whole = f'"\\n" call "\\n" {_marker(form.closing, token_of)}'
    return f"calls: {whole}" + ("" if one else f' ("\\n" {_marker(form.marker, token_of)} {whole})*')


def _call_rules(use: ToolUse, form: CallForm) -> list[str]:
    functions = use.callable
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        # Cut as JSON is where a schema is followed: the lexer could not tell longer pieces from `content`.
        head = ["{", '"name"', ": ", f'"{function.name}"', ", ", f'"{form.arguments}"', ": "]
        rules.append(f'call_{index}: {" ".join(map(json.dumps, head))} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(spaced(arguments_schema(function, use)))}")
    return rules


def _marker(text: str, token_of: TokenOf) -> str:
    token = token_of(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
