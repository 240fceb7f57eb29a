"""A conversation on its way to an answer, whichever API it came by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from fastapi import Request, Response

from gateway.api.answer import AnswerFormat, generate
from gateway.auth import Principal
from gateway.errors import invalid_request
from gateway.prompts import chat_prompt
from gateway.reasoning import Reasoning, reasoning_of
from gateway.resolve import ResolvedModel
from gateway.schemas.chat import ChatRequest
from gateway.services import Services
from gateway.submission import build_submits
from gateway.tokenizer import ModelTokenizer
from gateway.tools.plan import ToolPlan, plan_tools


async def model_for(
    request: Request, caller: Principal, name: str, user: str | None
) -> tuple[ResolvedModel, ModelTokenizer]:
    """Returns the model that a body names, and its tokenizer; has an engine begin to read its adapter.

    Raises ApiError as `ModelResolver.resolve`, and 429 when a limit is known to be used up.
    """
    services: Services = request.app.state.services
    model = await services.models.resolve(name, caller, user=user)
    services.admissions.refuse_spent(caller, model.adapter_name)
    services.models.announce(model)
    return model, await services.own_tokenizers.of(model)


async def converse(
    request: Request,
    body: ChatRequest,
    form_of: Callable[[ToolPlan], AnswerFormat],
    *,
    caller: Principal,
    model: ResolvedModel,
    tokenizer: ModelTokenizer,
    route: str,
    whole_arguments: bool = False,
) -> Response:
    """Continues a conversation by one message, in the form that `form_of` makes of how its tools are read.
    `whole_arguments`: see ToolUse.

    Raises ApiError 400 for what the model's template or an engine cannot do, and as `generate`.
    """
    services: Services = request.app.state.services
    use = body.tool_use
    if use is not None and whole_arguments:
        use = replace(use, whole_arguments=True)
    plan = await plan_tools(use, body, tokenizer)
    prompt = await chat_prompt(body, tokenizer, model, services.templates, tenant=caller.tenant_id)
    reasoning = reasoning_of(tokenizer, prompt, body.continued_text)
    submits = build_submits(
        body,
        [prompt],
        model=model,
        caller=caller,
        max_tokens=body.token_limit,
        logprobs=body.wanted_logprobs,
        end_tokens=tokenizer.end_tokens,
        grammar=await _grammar(plan, reasoning),
        banned=plan.banned,
    )
    return await generate(
        request,
        body,
        lambda: form_of(plan),
        submits,
        caller=caller,
        model=model,
        tokenizer=tokenizer,
        route=route,
        shown=plan.shown,
        reasoning=reasoning,
    )


async def _grammar(plan: ToolPlan, reasoning: Reasoning | None) -> str:
    """Returns what the whole answer must fit. It may hold a large schema, which is read in a thread."""
    if reasoning is None or not plan.grammar:
        return plan.grammar
    try:
        return await asyncio.to_thread(reasoning.before, plan.grammar)
    except RecursionError:
        message = "What the answer must fit is nested too deeply."
        raise invalid_request(message, code="invalid_structure") from None
