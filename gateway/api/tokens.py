"""`POST /tokenize` and `POST /detokenize`: what a model reads. Not in OpenAI's API; the names are vLLM's."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from gateway.api.counted import count_tokenization
from gateway.auth import Principal, require
from gateway.bodies import read_json
from gateway.described import described
from gateway.prompts import chat_prompt, text_tokens
from gateway.schemas.tokens import Detokenize, DetokenizedText, Tokenize, TokenList
from gateway.services import Services
from gateway.submission import check_tokens

router = APIRouter(tags=["models"])

Caller = Annotated[Principal, Depends(require("inference"))]


@router.post("/tokenize")
@described(TokenList, body=Tokenize, errors=(404,))
async def tokenize(request: Request, caller: Caller) -> dict[str, Any]:
    """Returns the tokens that inference would make of a text or of a conversation; counts as no request."""
    services: Services = request.app.state.services
    body = await read_json(request, Tokenize)
    await count_tokenization(request)
    model = await services.models.resolve(body.model, caller)
    tokenizer = await services.own_tokenizers.of(model)
    conversation = body.conversation
    if conversation is not None:
        tokens = await chat_prompt(
            conversation, tokenizer, model, services.templates, tenant=caller.tenant_id
        )
    else:
        with_special = body.add_special_tokens is not False
        tokens = await text_tokens(body.prompt or "", tokenizer, model, add_special_tokens=with_special)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": model.info.max_model_len}


@router.post("/detokenize")
@described(DetokenizedText, body=Detokenize, errors=(404,))
async def detokenize(request: Request, caller: Caller) -> dict[str, Any]:
    """Returns the text that tokens mean to the model."""
    services: Services = request.app.state.services
    body = await read_json(request, Detokenize)
    await count_tokenization(request)
    model = await services.models.resolve(body.model, caller)
    check_tokens(body.tokens, model.vocab_size, "tokens")
    tokenizer = await services.own_tokenizers.of(model)
    return {"prompt": await asyncio.to_thread(tokenizer.text_of, body.tokens)}
