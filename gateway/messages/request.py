"""From Anthropic's bodies to the chat request that they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.errors import ApiError, invalid_request
from gateway.reasoning import switch_of, thinks
from gateway.schemas.chat import ChatRequest, Conversation
from gateway.schemas.message_blocks import (
    ContentBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from gateway.schemas.messages import CustomTool, MessageInput, MessagesRequest, Thinking, ToolChoice
from gateway.tokenizer import ModelTokenizer

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NAMES = {"guided_json": "output_config.format.schema", ".function.parameters": ".input_schema"}
"""Fields of a chat request, by what a client of Anthropic's calls them."""


def conversation_of(body: MessageInput, tokenizer: ModelTokenizer) -> Conversation:
    """Returns what the prompt is made of, in time in proportion to the body.

    Raises ApiError 400 for thinking that the model does not do, and for what is nested too deeply.
    """
    return Conversation.model_validate(_prompt_fields(body, tokenizer))


def chat_request_of(body: MessagesRequest, tokenizer: ModelTokenizer) -> ChatRequest:
    """Returns the chat request, as `conversation_of` its prompt."""
    choice = body.tool_choice
    output = body.output_config.format if body.output_config else None
    return ChatRequest.model_validate(
        _prompt_fields(body, tokenizer)
        | {
            "model": body.model,
            "stream": body.stream,
            "stream_options": {"include_usage": True} if body.stream else None,
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "seed": body.seed,
            "user": body.metadata.user_id if body.metadata else None,
            "tool_choice": _choice(choice) if choice else None,
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "include_reasoning": _shows_thinking(body.thinking),
            "guided_json": output.schema_ if output else None,
        }
    )


def use_own_names(error: ApiError) -> None:
    """Has an error about a chat request speak of the client's own fields."""
    for ours, theirs in _NAMES.items():
        if error.param and ours in error.param:
            param = error.param.replace(ours, theirs)
            error.message = error.message.replace(error.param, param)
            error.param = param


def _prompt_fields(body: MessageInput, tokenizer: ModelTokenizer) -> dict[str, Any]:
    system = text_of(body.system or "")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    turns = body.turns[:-1] if body.prefill == "" else body.turns  # an empty beginning is none
    for role, blocks in turns:
        messages += [_assistant(blocks)] if role == "assistant" else _turn(role, blocks)
    if not messages:
        raise invalid_request("The messages make an empty prompt.", param="messages")
    return {
        "messages": messages,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "continue_final_message": bool(body.prefill),
        "chat_template_kwargs": _switch(body.thinking, tokenizer.template_source),
    }


def _turn(role: str, blocks: Sequence[ContentBlock]) -> list[dict[str, Any]]:
    """Returns what was said, and each result of a call, in order."""
    messages: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    for block in [*blocks, None]:
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if texts:
            messages.append({"role": role, "content": text_of(texts)})
            texts = []
        if isinstance(block, ToolResultBlock):
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.result})
    return messages


def _assistant(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return {
        "role": "assistant",
        "content": text_of([block for block in blocks if isinstance(block, TextBlock)]),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _call(block: ToolUseBlock) -> dict[str, Any]:
    try:
        arguments = json.dumps(block.input, ensure_ascii=False)
    except RecursionError:
        raise invalid_request("The 'input' of a call is nested too deeply.", param="messages") from None
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: CustomTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Any:
    if choice.name is None:
        return _CHOICES[choice.type]
    return {"type": "function", "function": {"name": choice.name}}


def _switch(thinking: Thinking | None, template: str | None) -> dict[str, Any] | None:
    """Returns the template's variable for thinking, if it has one. Raises ApiError 400 where the model is to
    think, and its template knows of no thinking.
    """
    kind = thinking.type if thinking else "disabled"
    if kind == "enabled" and not thinks(template):
        raise invalid_request(
            "The model's chat template knows of no thinking: leave 'thinking' out.",
            param="thinking",
            code="thinking_not_supported",
        )
    switch = switch_of(template)
    return None if switch is None else {switch: kind != "disabled"}


def _shows_thinking(thinking: Thinking | None) -> bool:
    """Whether the answer has blocks of what was thought: a model without a switch thinks in any case."""
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
