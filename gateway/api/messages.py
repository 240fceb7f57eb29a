"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response

from gateway.api.answer import ENGINE_ERRORS
from gateway.api.converse import converse, model_for
from gateway.api.counted import count_tokenization
from gateway.auth import Principal, require
from gateway.bodies import read_json
from gateway.described import EVENTS, described
from gateway.errors import ApiError
from gateway.messages.answer import MessageFormat
from gateway.messages.request import chat_request_of, conversation_of, use_own_names
from gateway.prompts import chat_prompt
from gateway.schemas.message_answers import MessageAnswer, MessageEvent, TokenCount
from gateway.schemas.messages import MessageInput, MessagesRequest
from gateway.services import Services
from gateway.tools.plan import ToolPlan

router = APIRouter(tags=["inference"])

Result = TypeVar("Result")

_SMALL_BYTES = 16 * 1024

Caller = Annotated[Principal, Depends(require("inference"))]


@router.post("/v1/messages")
@described(
    MessageAnswer,
    media={EVENTS: MessageEvent},
    body=MessagesRequest,
    errors=ENGINE_ERRORS,
    headers=("X-Request-Timeout",),
)
async def create_message(request: Request, caller: Caller) -> Response:
    """Continues a conversation by one message, in Anthropic's form."""
    services: Services = request.app.state.services
    services.admissions.refuse_spent(caller)
    body = await read_json(request, MessagesRequest)
    user = body.metadata.user_id if body.metadata else None
    model, tokenizer = await model_for(request, caller, body.model, user)
    chat = await _run(request, lambda: chat_request_of(body, tokenizer))

    def form_of(plan: ToolPlan) -> MessageFormat:
        return MessageFormat(model, plan, include_thinking=chat.include_reasoning)

    try:
        return await converse(
            request,
            chat,
            form_of,
            caller=caller,
            model=model,
            tokenizer=tokenizer,
            route="messages",
            whole_arguments=True,
        )
    except ApiError as error:
        use_own_names(error)
        raise


@router.post("/v1/messages/count_tokens")
@described(TokenCount, body=MessageInput, errors=(404,))
async def count_message_tokens(request: Request, caller: Caller) -> dict[str, Any]:
    """Says how many tokens a conversation has as a prompt; counts as no request."""
    services: Services = request.app.state.services
    body = await read_json(request, MessageInput)
    await count_tokenization(request)
    model = await services.models.resolve(body.model, caller)
    tokenizer = await services.own_tokenizers.of(model)
    conversation = await _run(request, lambda: conversation_of(body, tokenizer))
    prompt = await chat_prompt(conversation, tokenizer, model, services.templates, tenant=caller.tenant_id)
    return {"input_tokens": len(prompt)}


async def _run(request: Request, work: Callable[[], Result]) -> Result:
    """Runs the work in a thread, or here where the body that has been read is small."""
    is_small = request.state.body_bytes <= _SMALL_BYTES
    return work() if is_small else await asyncio.to_thread(work)
