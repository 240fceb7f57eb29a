"""Tools on a whole stack: adapters whose own templates show them, and calls that the engine must make."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerFast

from tests.e2e.processes import Stack
from tests.e2e.tiny import TINY, TinyZoo, upload
from tests.gateway.tool_templates import ADDED, SPECIAL, TEMPLATES

pytestmark = pytest.mark.e2e

QUESTION: Any = [{"role": "user", "content": "w1?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 5},
                "day": {"enum": ["today", "日本", "🙂"]},
            },
            "required": ["place", "day"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def key(tiny_stack: Stack, zoo: TinyZoo) -> str:
    """A key of a tenant with an adapter for each form of calls."""
    key = tiny_stack.create_tenant("callers")
    for seed, form in enumerate(("hermes", "llama", "mistral"), 90):
        folder = zoo.add(form, seed=seed)
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(zoo.folder / "model")
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
        tokenizer.add_tokens(list(ADDED))
        tokenizer.chat_template = TEMPLATES[form]
        tokenizer.save_pretrained(folder)
        upload(tiny_stack, key, form, folder)
    return key


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
def test_a_required_call_fits_its_schema_streamed_or_not(tiny_stack: Stack, key: str, form: str) -> None:
    arguments: Any = {"model": form, "messages": QUESTION, "tools": [TOOL], "seed": 5, "n": 2}
    arguments |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    with tiny_stack.client(key) as client:
        whole = client.chat.completions.create(**arguments)
        with client.chat.completions.stream(**arguments) as stream:
            streamed = stream.get_final_completion()
        for one, other in zip(whole.choices, streamed.choices, strict=True):
            assert one.finish_reason == other.finish_reason == "tool_calls"
            assert one.message.content is None and other.message.content is None
            call, same = (*(one.message.tool_calls or ()), *(other.message.tool_calls or ()))
            assert call.type == same.type == "function"
            assert call.function.name == same.function.name == "weather"
            assert call.function.arguments == same.function.arguments
            found = json.loads(call.function.arguments)
            assert found.keys() == {"place", "day"} and len(found["place"]) <= 5
            assert found["day"] in ("today", "日本", "🙂")
        turns: Any = [
            *QUESTION,
            whole.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": whole.choices[0].message.tool_calls[0].id, "content": "rain"},
        ]
        after = client.chat.completions.create(model=form, messages=turns, tools=[TOOL], max_tokens=4)
        assert after.usage is not None and whole.usage is not None
        assert after.usage.prompt_tokens > whole.usage.prompt_tokens


def test_the_base_model_s_template_shows_no_tools(tiny_stack: Stack, key: str) -> None:
    with tiny_stack.client(key) as client, pytest.raises(openai.BadRequestError, match="does not show tools"):
        client.chat.completions.create(model=TINY, messages=QUESTION, tools=[TOOL])
