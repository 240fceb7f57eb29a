"""What has to be known of a request with tools before it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from gateway.errors import ApiError, invalid_request
from gateway.grammars import grammar_of, lark_grammar, schema_fault, unusable
from gateway.schemas.structure import Structure, StructureFields
from gateway.tokenizer import ModelTokenizer
from gateway.tools.forms import CallForm, form_of
from gateway.tools.grammar import Schema, arguments_schema, call_grammar
from gateway.tools.parser import CallParser
from gateway.tools.use import Calls, ToolUse

_NOT_SHOWN = (
    "The model's chat template does not show tools to the model{reason}: use a model or an adapter whose "
    "template does, or leave 'tools' out."
)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How the answer to one request is held, and read. Without tools, or with calls forbidden, it is text."""

    grammar: str = ""
    """What each choice must fit, as llguidance takes it; "" when it is free."""
    banned: Collection[int] = ()
    """Tokens that must not come."""
    shown: frozenset[int] = frozenset()
    """Special tokens that belong to calls."""
    form: CallForm | None = None
    """How calls are written; None when there are none to be read."""
    names: Collection[str] = ()

    def parser(self) -> CallParser | None:
        """Returns what reads one choice; None where it is text."""
        return CallParser(self.form, self.names) if self.form else None


async def plan_tools(use: ToolUse | None, fields: StructureFields, tokenizer: ModelTokenizer) -> ToolPlan:
    """Returns how a request's answer is held to what `use` and the fields for structured output say.

    Raises ApiError 400 for tools that the chat template does not show, and for what cannot be held to.
    """
    if use is None:
        return ToolPlan(grammar=await grammar_of(fields))
    form = form_of(tokenizer.template_source)
    if form is None:
        raise not_shown(", or in a form whose calls this server cannot read")
    tokens = {token for marker in form.markers if (token := tokenizer.added_token(marker)) is not None}
    if use.calls is Calls.FORBIDDEN:
        return ToolPlan(grammar=await grammar_of(fields), banned=tokens)
    grammar = await asyncio.to_thread(_grammar, use, form, tokenizer, fields.structure)
    names = frozenset(function.name for function in use.functions)
    return ToolPlan(grammar, shown=frozenset(tokens), form=form, names=names)


def not_shown(reason: str = "") -> ApiError:
    """Returns the 400 for tools that the model would never hear of."""
    return invalid_request(_NOT_SHOWN.format(reason=reason), param="tools", code="tools_not_supported")


def _grammar(use: ToolUse, form: CallForm, tokenizer: ModelTokenizer, structure: Structure | None) -> str:
    content = _content(structure) if structure and use.calls is Calls.ALLOWED else None
    try:
        text = call_grammar(use, form, tokenizer, content)
        grammar, fault = lark_grammar(text) if text else ("", "")
    except (ValueError, RecursionError) as error:
        grammar, fault = "", str(error)
    if not fault:
        return grammar
    for index, function in enumerate(use.functions):
        if own_fault := schema_fault(arguments_schema(function, use)):
            raise unusable(f"tools[{index}].function.parameters", own_fault)
    raise unusable(structure.param if structure else "tools", fault)


def _content(structure: Structure) -> Schema:
    """Returns the schema of an answer without calls."""
    if structure.kind == "object":
        return {"type": "object"}
    if structure.kind == "json":
        return structure.value
    raise invalid_request(
        f"'{structure.param}' excludes 'tools', unless 'tool_choice' is 'none' or requires a call.",
        param=structure.param,
        code="invalid_value",
    )
