"""What an answer with tools must fit, as a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.grammars import spaced
from gateway.schema_care import check_multiples
from gateway.tokenizer import ModelTokenizer
from gateway.tools.forms import CallForm
from gateway.tools.use import Calls, Function, ToolUse

Schema = dict[str, Any] | bool

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANYTHING = r"/(.|\n)*/"


def call_grammar(
    use: ToolUse, form: CallForm, tokenizer: ModelTokenizer, content: Schema | None = None
) -> str:
    """Returns the grammar in Lark; "" when answers are free.

    They are held where a call is required, where a function that may be called is strict, where only one call
    may come or arguments must be whole, and where `content`, a schema, says what an answer without calls must
    fit. Raises ValueError as `with_care`, also for what is only together too much.
    """
    functions = use.callable
    held = content is not None or not use.parallel or use.whole_arguments
    held = held or any(each.strict for each in functions)
    if not functions or not (held or use.calls is Calls.REQUIRED):
        return ""
    check_multiples([content, *(arguments_schema(each, use) for each in functions)])
    marker = _marker(form.marker, tokenizer) + ("?" if form.bare else "")
    rules = [_calls_rule(use, form, tokenizer), *_call_rules(use, form)]
    if use.calls is Calls.REQUIRED:
        start = f"{marker} calls"
    elif content is not None:
        start = f"content | {marker} calls"
        rules.append(f"content: %json {json.dumps(spaced(content))}")
    elif form.bare:
        start = f"TEXT? | {marker} calls"
        rules.append(r"TEXT: /[^{<\s](.|\n)*/")
    else:
        start = "text | text_and_marker calls"
        rules += _text_rules(form, tokenizer)
    if tokenizer.end_tokens:
        # Those that are not the base model's are as good an end.
        start = f"({start}) {_one_of(tokenizer.end_tokens)}?"
    return "\n".join([f"start: {start}", *rules])


def arguments_schema(function: Function, use: ToolUse) -> dict[str, Any]:
    """Returns what a function's arguments are held to where any are."""
    if use.calls is not Calls.REQUIRED and not function.strict:
        return _ANY_OBJECT
    return _NO_ARGUMENTS if function.parameters is None else _ANY_OBJECT | function.parameters


def _text_rules(form: CallForm, tokenizer: ModelTokenizer) -> list[str]:
    """Text that holds no call, so that none escapes its schema, with or without a marker behind it."""
    tags = [token for token in tokenizer.tags if token != tokenizer.added_token(form.marker)]
    tag = f"{_one_of(tags)} " if tags else ""
    literal = json.dumps(form.marker)
    rules = [
        f"text: TEXT? ({tag}TEXT?)*" if tags else "text: TEXT?",
        r"TEXT: /(.|\n)+/ & ~CALL",
        f"CALL: {_ANYTHING} {literal} {_ANYTHING}",
    ]
    if tokenizer.added_token(form.marker) is not None:
        return [*rules, f"text_and_marker: text {_marker(form.marker, tokenizer)}"]
    before = f"(TEXT? {tag})* " if tags else ""
    return [*rules, f"text_and_marker: {before}rest", f"rest[lazy]: {_ANYTHING} {literal}"]


def _calls_rule(use: ToolUse, form: CallForm, tokenizer: ModelTokenizer) -> str:
    """What follows the first marker."""
    one = use.one_call or form.single
    if form.listed:
        return 'calls: " "? "[" call "]"' if one else 'calls: " "? "[" call (", " call)* "]"'
    if form.bare:
        return "calls: call"
    whole = f'"\\n" call "\\n" {_marker(form.closing, tokenizer)}'
    return f"calls: {whole}" + ("" if one else f' ("\\n" {_marker(form.marker, tokenizer)} {whole})*')


def _call_rules(use: ToolUse, form: CallForm) -> list[str]:
    functions = use.callable
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        # Cut as JSON is where a schema is followed: the lexer could not tell longer pieces from `content`.
        head = ["{", '"name"', ": ", f'"{function.name}"', ", ", f'"{form.arguments}"', ": "]
        rules.append(f'call_{index}: {" ".join(map(json.dumps, head))} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(spaced(arguments_schema(function, use)))}")
    return rules


def _marker(text: str, tokenizer: ModelTokenizer) -> str:
    """A marker that is a single token can be spelt by no others."""
    token = tokenizer.added_token(text)
    return json.dumps(text) if token is None else _one_of([token])


def _one_of(tokens: Sequence[int]) -> str:
    return f"<[{','.join(map(str, tokens))}]>"
