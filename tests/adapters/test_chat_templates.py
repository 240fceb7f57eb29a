"""Several templates in one, against transformers with all of them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from adapters.chat_templates import stated_template
from gateway.chat_template import ChatTemplate
from tests.gateway.fake_engine import make_tokenizer
from tests.gateway.tool_templates import TEMPLATES

MESSAGES: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
# A loop variable of one must not be seen by the other, and each ends with a line end of its own.
ENDING = "  {%- set x = 1 %}\n{{ x }} {{ messages[0].content }}\n\n"


@pytest.mark.parametrize("default", [TEMPLATES["plain"], ENDING])
@pytest.mark.parametrize("with_tools", [TEMPLATES["hermes"], TEMPLATES["mistral"], ENDING])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_of_several_the_one_for_tools_is_taken_with_tools(default: str, with_tools: str, tools: Any) -> None:
    named = {"default": default, "tool_use": with_tools, "rag": "{{ documents }}"}
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), eos_token="<|im_end|>")
    oracle.chat_template = named
    stated = [{"name": name, "template": template} for name, template in named.items()]
    both = stated_template(stated)
    assert both is not None
    found = ChatTemplate(both, {"eos_token": "<|im_end|>"}).render(MESSAGES, tools=tools)
    assert found == oracle.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("stated", "template"),
    [
        ("x", "x"),
        (None, None),
        ([], None),
        ([{"name": "default", "template": "x"}, {"name": "rag", "template": "y"}], "x"),
        ([{"name": "tool_use", "template": "y"}], None),
        ([1, {"name": "default"}, {"template": "y"}], None),
    ],
)
def test_without_two_it_is_the_one_for_chat(stated: object, template: str | None) -> None:
    assert stated_template(stated) == template
