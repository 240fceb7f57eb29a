"""A model that thinks, on a whole stack: the engine holds an answer to its form behind the thought."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import Anthropic
from transformers import PreTrainedTokenizerFast

from tests.e2e.processes import Stack
from tests.e2e.tiny import TinyZoo, upload
from tests.gateway.tool_templates import ADDED, SPECIAL, TEMPLATES

pytestmark = pytest.mark.e2e

QUESTION: Any = [{"role": "user", "content": "w1?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"day": {"enum": ["日本", "🙂"]}, "warm": {"type": "boolean"}},
    "required": ["day", "warm"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "day", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def closing(zoo: TinyZoo, tiny_stack: Stack) -> tuple[str, int]:
    """A key of a tenant with an adapter for each kind of thinking, and the token that ends a thought."""
    key = tiny_stack.create_tenant("thinkers")
    for seed, form in enumerate(("thinking", "always"), 70):
        folder = zoo.add(form, seed=seed)
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(zoo.folder / "model")
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
        tokenizer.add_tokens(list(ADDED))
        tokenizer.chat_template = TEMPLATES[form]
        tokenizer.save_pretrained(folder)
        upload(tiny_stack, key, form, folder)
    return key, tokenizer.convert_tokens_to_ids("</think>")


@pytest.mark.parametrize("model", ["thinking", "always"])
def test_a_form_begins_behind_the_thought(tiny_stack: Stack, closing: tuple[str, int], model: str) -> None:
    key, close_token = closing
    open_token = close_token - 1
    # A model of random weights has to be talked into thinking, and out of it.
    bias = {str(close_token): 3, str(open_token): 100 if model == "thinking" else 0}
    arguments: Any = {"model": model, "messages": QUESTION, "response_format": FORMAT, "seed": 3}
    arguments |= {"logit_bias": bias, "max_tokens": 1500, "extra_body": {"min_tokens": 8}}
    with tiny_stack.client(key) as client:
        whole = client.chat.completions.create(**arguments)
        thought = said = ""
        for chunk in client.chat.completions.create(stream=True, **arguments):
            delta = chunk.choices[0].delta
            thought += (delta.model_extra or {}).get("reasoning_content", "")
            said += delta.content or ""
    message = whole.choices[0].message
    assert (message.model_extra or {})["reasoning_content"] == thought and thought
    assert message.content == said and whole.choices[0].finish_reason == "stop"
    assert json.loads(said).keys() == {"day", "warm"}
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens


def test_a_message_has_its_thought_in_a_block(tiny_stack: Stack, closing: tuple[str, int]) -> None:
    key, _ = closing
    arguments: Any = {"model": "always", "messages": QUESTION, "max_tokens": 1025, "extra_body": {"seed": 1}}
    arguments["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    with Anthropic(base_url=tiny_stack.url, api_key=key, max_retries=0) as client:
        whole = client.messages.create(**arguments)
        with client.messages.stream(**arguments) as stream:
            streamed = stream.get_final_message()
    assert whole.content[0].type == "thinking"
    dumped = [
        [block.model_dump(exclude={"parsed_output"}) for block in each.content] for each in (whole, streamed)
    ]
    assert dumped[0] == dumped[1]
