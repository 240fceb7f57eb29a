"""Renders a model's chat template exactly as transformers'
`apply_chat_template` does, in a sandbox with a budget.

The template comes with the model, so whoever published the model wrote it:
it may not reach Python's internals (jinja2's immutable sandbox), and may
not loop for ever (a budget of loop rounds, macro calls and range items).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_ROUNDS = 100_000
_MAX_REPEATED_CHARS = 10_000_000
_MAX_EXPONENT = 64

# What transformers appends to the message to be continued, to find its end in the rendered text.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

Message = dict[str, Any]


class ChatTemplateError(Exception):
    """The template refuses or cannot render these messages. The text is for the client."""


class ChatTemplate:
    """One model's chat template. Safe to use from several threads."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables` are the tokenizer's named special tokens: bos_token, eos_token and the like.

        Raises ChatTemplateError when the source is not a template.
        """
        self._source = source
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"The model's chat template cannot be compiled: {error}") from error
        # jinja2 copies them for each rendering, from a chain of dictionaries unless they are one.
        self._template.globals = dict(self._template.globals)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt's text. `variables` win over the special tokens. Raises ChatTemplateError."""
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("add_generation_prompt and continue_final_message exclude each other.")
        chat, final = list(messages), None
        if continue_final_message:
            chat, final = self._tagged(chat)
        _budget.remaining = _MAX_ROUNDS
        try:
            text = self._template.render(
                messages=chat,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **(variables or {})},
            )
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ChatTemplateError(
                f"The model's chat template cannot render these messages: {error}"
            ) from error
        return text if final is None else _cut_after(text, final)

    def _tagged(self, messages: list[Message]) -> tuple[list[Message], str]:
        """Returns the messages with the tag at the end of the last one's content, and that content."""
        chat = deepcopy(messages)
        content = chat[-1].get("content")
        if not isinstance(content, str):
            raise ChatTemplateError(
                "continue_final_message is set but the final message has no text to continue."
            )
        if "content" not in self._source:
            raise ChatTemplateError("The model's chat template does not render the messages' content.")
        chat[-1]["content"] = content + _CONTINUE_TAG
        return chat, content


def _cut_after(text: str, final: str) -> str:
    """Returns the rendered text up to the end of the message that is to be continued."""
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise ChatTemplateError(
            "The model's chat template drops or changes the final message, so it cannot be continued."
        )
    end = text.rindex(tag)
    if text[end : end + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:end]
    return text[:end].rstrip()  # the template trims messages


class _Budget(threading.local):
    """What one rendering may still spend; a rendering stays on its thread."""

    remaining = _MAX_ROUNDS

    def spend(self, amount: int) -> None:
        self.remaining -= amount
        if self.remaining < 0:
            raise SecurityError("it loops for too long")


_budget = _Budget()


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: marks text for training; here, renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Rounds(Extension):
    """Gives compiled loops and macros a way to the budget that no template variable can shadow."""

    def spend_one(self) -> None:
        _budget.spend(1)

    def node(self) -> nodes.Stmt:
        return nodes.ExprStmt(self.call_method("spend_one"))


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, whose loops and macros spend from the budget, and whose products stay small."""

    intercepted_binops = frozenset({"*", "**"})

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        # jinja2's hook between parsing and compiling.
        rounds: Any = self.extensions[_Rounds.identifier]
        for node in list(source.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            node.body.insert(0, rounds.node().set_lineno(node.lineno).set_environment(self))
        return super()._generate(source, name, filename, defer_init)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 2**_MAX_EXPONENT or abs(right) > _MAX_EXPONENT):
            raise SecurityError("it raises a number to too high a power")
        if operator == "*":
            for times, repeated in ((left, right), (right, left)):
                sequence = isinstance(repeated, str | list | tuple)
                if sequence and isinstance(times, int) and times * len(repeated) > _MAX_REPEATED_CHARS:
                    raise SecurityError("it repeats a text too often")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Rounds, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, range=_range)
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _range(*bounds: int) -> range:
    items = range(*bounds)
    # len() fails beyond the machine's word; such a range is over any budget.
    _budget.spend(len(items) if abs(items.stop - items.start) < 2**62 else _MAX_ROUNDS + 1)
    return items


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
