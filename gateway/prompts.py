"""From a body to prompt tokens: chat template and tokenizer, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gateway.chat_template import ChatTemplateError
from gateway.errors import invalid_request
from gateway.resolve import ResolvedModel
from gateway.schemas.chat import Conversation
from gateway.submission import check_tokens, too_long
from gateway.template_host import TemplateHost
from gateway.tokenizer import ModelTokenizer
from gateway.tools.forms import form_of
from gateway.tools.history import prepare_history
from gateway.tools.plan import not_shown
from protos.engine_pb2 import ModelInfo

Result = TypeVar("Result")

_SHORT = 1000
"""Characters that are tokenised on the event loop: in 0.3 ms, about what handing them to a thread costs."""
_MESSAGE = 50
"""Characters that a message counts as, beside its text."""


async def chat_prompt(
    body: Conversation,
    tokenizer: ModelTokenizer,
    model: ResolvedModel,
    templates: TemplateHost,
    *,
    tenant: str,
) -> list[int]:
    """Returns a conversation's tokens, for a request of a tenant. Raises ApiError 400 when the template
    refuses it, or it is far too long.
    """
    messages = [message.for_template() for message in body.messages]
    options = _template_options(body)
    form = form_of(tokenizer.template_source)
    tools = body.tools or ()
    if tools and form is None:
        raise not_shown()
    # What a client hands to the template may keep it busy for long.
    short = not (tools or body.chat_template_kwargs or any("tool_calls" in each for each in messages))
    short = short and sum(_MESSAGE + len(each["content"]) for each in messages) <= _SHORT

    def tokens_of(text: str) -> list[int]:
        if any(tool.function.name not in text for tool in tools):
            raise not_shown(" here")
        return _chat_tokens(text, tokenizer, model)

    def rendered() -> list[int]:
        prepare_history(messages, form)
        return tokens_of(tokenizer.chat_template.render(messages, **options))

    try:
        if tokenizer.trusted or tokenizer.template_source is None:
            return await _run(rendered, short=short)
        await _run(lambda: prepare_history(messages, form), short=short)
        text = await templates.render(
            tenant, tokenizer.template_source, tokenizer.named_tokens, messages, options
        )
    except ChatTemplateError as error:
        raise invalid_request(str(error), param="messages", code="invalid_chat") from error
    return await asyncio.to_thread(tokens_of, text)


async def prompts_of(
    inputs: Sequence[str] | Sequence[Sequence[int]],
    tokenizer: ModelTokenizer,
    model: ResolvedModel,
    *,
    param: str = "prompt",
) -> Sequence[Sequence[int]]:
    """Returns the tokens of each of the inputs in the field `param`, at least one token each.

    Raises ApiError 400.
    """
    prompts = await _run(
        lambda: [
            _encode(tokenizer, given, model.info, add_special_tokens=True)
            if isinstance(given, str)
            else given
            for given in inputs
        ],
        short=sum(len(given) for given in inputs if isinstance(given, str)) <= _SHORT,
    )
    for given, prompt in zip(inputs, prompts, strict=True):
        if not prompt:
            raise invalid_request(f"The {param} is empty: it must have at least one token.", param=param)
        if not isinstance(given, str):
            check_tokens(prompt, model.vocab_size, param)
    return prompts


async def text_tokens(
    text: str, tokenizer: ModelTokenizer, model: ResolvedModel, *, add_special_tokens: bool
) -> list[int]:
    """Returns a text's tokens, of which there may be none. Raises ApiError 400 when it is far too long."""
    return await _run(
        lambda: _encode(tokenizer, text, model.info, add_special_tokens=add_special_tokens),
        short=len(text) <= _SHORT,
    )


async def _run(work: Callable[[], Result], *, short: bool) -> Result:
    """Runs the work in a thread, or here where it is `short`."""
    return work() if short else await asyncio.to_thread(work)


def _template_options(body: Conversation) -> dict[str, Any]:
    add_generation_prompt = body.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not body.continue_final_message
    return {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "tools": [tool.to_function().for_template() for tool in body.tools] if body.tools else None,
        "variables": body.chat_template_kwargs,
    }


def _chat_tokens(text: str, tokenizer: ModelTokenizer, model: ResolvedModel) -> list[int]:
    tokens = _encode(tokenizer, text, model.info, add_special_tokens=False)
    if not tokens:
        raise invalid_request("The messages make an empty prompt.", param="messages")
    return tokens


def _encode(tokenizer: ModelTokenizer, text: str, info: ModelInfo, *, add_special_tokens: bool) -> list[int]:
    """Encodes, unless the text is so long that it cannot
    fit whatever its tokens are: that would take seconds.
    """
    least = len(text) // tokenizer.longest_token
    if least >= info.max_model_len:
        raise too_long(f"at least {least}", info.max_model_len)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
