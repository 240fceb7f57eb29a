"""Chat templates in the manner of the families, with what they are particular about."""

from __future__ import annotations

import json

from tokenizers import AddedToken

from tests.gateway.fake_engine import CHAT_TEMPLATE, make_tokenizer

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools: <tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nWrite <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA = """\
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}
    {{- 'Respond with {"name": function name, "parameters": arguments}.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('ipython' if message.role == 'tool' else message.role) + '\\n\\n' }}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.first %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('IDs have 9 characters!') }}{%- endif %}
            {{- call.function | tojson }}{{- ', ' if not loop.last else ']<|im_end|>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('9 characters!') }}{%- endif %}
        {{- '[TOOL_RESULTS] ' + message.tool_call_id + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{- ' ' + message.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
"""

SHY = (
    "{% if tools and messages[0].role == 'system' %}<tool_call>{{ tools | tojson }}{% endif %}"
    + CHAT_TEMPLATE
)

THINKING = HERMES.replace(
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}",
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content %}"
    "{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{{- message.content.split('</think>')[-1].lstrip('\\n') }}",
).replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
)
"""As Qwen 3's: thinks, with a variable that says not to."""

ALWAYS_THINKING = CHAT_TEMPLATE.replace(
    "message['content'] +", "message['content'].split('</think>')[-1] +"
).replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
"""As DeepSeek R1's: the prompt ends within the thought."""

TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "plain": CHAT_TEMPLATE,
    "shy": SHY,
    "thinking": THINKING,
    "always": ALWAYS_THINKING,
}
"""By family; the plain one shows no tools, and the shy one only below a system message."""

SPECIAL = ("[TOOL_CALLS]", "<|python_tag|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def tokenizer_files(template: str) -> dict[str, bytes]:
    """A tokenizer's files with that template, where markers are tokens, special ones or not."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens(list(ADDED))
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}).encode(),
        "chat_template.jinja": template.encode(),
    }
