"""The forms in which models write calls, and which of them a chat template teaches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from gateway.template_words import in_tag


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls look in a model's answer: objects of JSON behind a marker.

    HERMES   <tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>
    MISTRAL  [TOOL_CALLS] [{"name": "f", "arguments": {}}, …]
    LLAMA    {"name": "f", "parameters": {}}
    """

    marker: str
    """Begins the calls, or one of them."""
    arguments: str
    """The arguments' key."""
    closing: str = ""
    """Ends a call, if anything does."""
    listed: bool = False
    """Whether calls are the items of a list."""
    bare: bool = False
    """Whether the marker may be absent: then an answer that begins with a call has no text."""
    single: bool = False
    """Whether templates can show one call a message only."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that are part of the form, and may be special tokens."""
        return tuple(filter(None, (self.marker, self.closing)))


HERMES = CallForm("<tool_call>", "arguments", closing="</tool_call>")
MISTRAL = CallForm("[TOOL_CALLS]", "arguments", listed=True)
LLAMA = CallForm("<|python_tag|>", "parameters", bare=True, single=True)

# Never reads past the next "name": whoever publishes a model writes its template.
_LLAMA_CALL = re.compile(r'"name":(?:(?!"name":).){0,200}?"parameters":', re.DOTALL)
_OTHERS = ("<function=", "[ARGS]", "<arg_key>")
"""What marks forms that are not read: they have the markers of those that are."""


@lru_cache(maxsize=256)
def form_of(template: str | None) -> CallForm | None:
    """Returns the form that a chat template teaches the model; None when it shows no tools, or teaches one
    that cannot be read.
    """
    if template is None or not in_tag(template, "tools") or any(other in template for other in _OTHERS):
        return None
    for form in (MISTRAL, HERMES):
        if form.marker in template:
            return form
    return LLAMA if LLAMA.marker in template or _LLAMA_CALL.search(template) else None
