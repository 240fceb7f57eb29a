"""Whether an answer begins with what the model thinks, by its chat template and the prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gateway.reasoning_text import CLOSE, OPEN, ReasoningSplitter
from gateway.template_words import in_tag
from gateway.tokenizer import ModelTokenizer

_TAIL_TOKENS = 16  # room for the opening mark and white space, were each character a token
_SWITCHES = ("enable_thinking", "thinking")
"""The names that templates have for the variable that says whether to think."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """That one answer may have a part that is thought."""

    opened: bool
    """Whether the prompt ends within it."""
    open_token: int | None
    close_token: int | None
    """The marks, where they are tokens."""

    @property
    def shown(self) -> frozenset[int]:
        """The tokens that the splitter must see as text."""
        return frozenset(token for token in (self.open_token, self.close_token) if token is not None)

    def splitter(self) -> ReasoningSplitter:
        """Returns what reads one choice."""
        return ReasoningSplitter(opened=self.opened)

    def before(self, grammar: str) -> str:
        """Returns a grammar, as llguidance takes it, that has the thought go before what `grammar` holds. The
        thought itself is free. Takes time in proportion to it, and raises RecursionError where it is deep.
        """
        open_mark, close_mark = _mark(OPEN, self.open_token), _mark(CLOSE, self.close_token)
        rest = r"rest[lazy]: /(.|\n)*/ " + close_mark
        if self.close_token is not None:
            rest = f"rest: TEXT? {close_mark}\nTEXT: /(.|\\n)+/"
        start = "rest WS?" if self.opened else f"(WS? {open_mark} rest WS?)?"
        thought = f"start: {start} @answer\n{rest}\nWS: /[ \\t\\r\\n]+/"
        # What is no list of grammars is one in Lark.
        inner = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
        return json.dumps({"grammars": [{"lark_grammar": thought}, {**inner, "name": "answer"}]})


def reasoning_of(
    tokenizer: ModelTokenizer, prompt: Sequence[int], continued: str | None = None
) -> Reasoning | None:
    """Returns how the answer to a conversation is split; None where it holds no thought: the template knows
    of none, or the prompt ends behind it. `continued` is the message that the answer goes on with, if any.
    """
    if not thinks(tokenizer.template_source):
        return None
    if continued is not None:
        opened = continued.rfind(OPEN) > continued.rfind(CLOSE)
        ended = not opened
    else:
        end = tokenizer.text_of(prompt[-_TAIL_TOKENS:]).rstrip()
        opened, ended = end.endswith(OPEN), end.endswith(CLOSE)
    if ended:
        return None
    return Reasoning(opened, tokenizer.added_token(OPEN), tokenizer.added_token(CLOSE))


def thinks(template: str | None) -> bool:
    """Whether a chat template knows of thinking."""
    return template is not None and CLOSE in template


@lru_cache(maxsize=256)
def switch_of(template: str | None) -> str | None:
    """Returns the template's variable that turns thinking on and off; None where there is none."""
    if template is None or not thinks(template):
        return None
    return next((name for name in _SWITCHES if in_tag(template, name)), None)


def _mark(text: str, token: int | None) -> str:
    return json.dumps(text) if token is None else f"<[{token}]>"
