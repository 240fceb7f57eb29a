"""Renders chat templates that tenants uploaded: `python -m gateway.template_worker`, of `template_host`.

One question on standard input, one answer on standard output, each a JSON object behind its length. What a
template spends in memory is bounded here, and what it spends in time by whoever waits for the answer.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
from functools import lru_cache
from typing import Any

from gateway.chat_template import ChatTemplate, ChatTemplateError

LENGTH = struct.Struct("<I")
MAX_TEXT_CHARS = 4 << 20
_MAX_MEMORY_BYTES = 1 << 30
_MAX_COMPILED = 64


@lru_cache(maxsize=_MAX_COMPILED)
def _compiled(source: str, variables: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(variables))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The `text` that a template gives, or the `fault` that it has."""
    try:
        template = _compiled(question["source"], tuple(question["named_tokens"].items()))
        text = template.render(question["messages"], **question["options"])
        if len(text) > MAX_TEXT_CHARS:
            return {"fault": "The chat template makes a text that is too long."}
        return {"text": text}
    except (ChatTemplateError, RecursionError) as error:
        return {"fault": str(error)[:1000] or "The chat template is nested too deeply."}
    except MemoryError:
        return {"fault": "The chat template takes too much memory."}


def main() -> None:
    """Answers until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := questions.read(LENGTH.size):
        question = json.loads(questions.read(*LENGTH.unpack(head)))
        # Lone surrogates, which JSON can spell, have no UTF-8.
        data = json.dumps(answer(question)).encode()
        answers.write(LENGTH.pack(len(data)) + data)
        answers.flush()


if __name__ == "__main__":
    main()
