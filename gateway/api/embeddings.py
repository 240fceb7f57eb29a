"""`POST /v1/embeddings`: what the model's last layer says of texts, as vectors."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response

from gateway.api.answer import ENGINE_ERRORS
from gateway.auth import Principal, require
from gateway.bodies import read_json
from gateway.deadlines import deadline_of
from gateway.described import described
from gateway.disconnects import DisconnectWatch
from gateway.errors import ApiError, invalid_request, unavailable
from gateway.generation import Generation, Usage
from gateway.origin import Origin, origin_of
from gateway.prompts import prompts_of
from gateway.resolve import ResolvedModel, cache_scope
from gateway.schemas.embeddings import EmbeddingList, EmbeddingRequest
from gateway.services import Services
from gateway.sse import STOPPING
from gateway.submission import adapter_for, too_long
from gateway.tokenizer import ModelTokenizer
from protos.engine_pb2 import Pooling, Submit

router = APIRouter(tags=["inference"])


@router.post("/v1/embeddings")
@described(EmbeddingList, body=EmbeddingRequest, errors=ENGINE_ERRORS, headers=("X-Request-Timeout",))
async def create_embeddings(
    request: Request, caller: Annotated[Principal, Depends(require("inference"))]
) -> Response:
    """Makes a vector of length 1 of each input, with the model or an adapter."""
    services: Services = request.app.state.services
    services.admissions.refuse_spent(caller)
    body = await read_json(request, EmbeddingRequest)
    model = await services.models.resolve(body.model, caller, user=body.user)
    services.admissions.refuse_spent(caller, model.adapter_name)
    services.models.announce(model)
    if body.dimensions is not None and body.dimensions > model.info.hidden_size:
        message = f"'dimensions' is {body.dimensions}, but the model's vectors have {model.info.hidden_size}."
        raise invalid_request(message, param="dimensions", code="invalid_value")
    tokenizer = await services.own_tokenizers.of(model)
    prompts = await prompts_of(body.inputs, tokenizer, model, param="input")
    origin = origin_of(request, "embeddings")
    submits = _submits(body, prompts, caller=caller, model=model, origin=origin)
    deadline = deadline_of(
        request.headers, services.settings.request_timeout_s, arrived_at=request.state.arrived_at
    )
    admitting = services.admissions.admit(
        caller,
        model,
        submits,
        request_id=request.state.request_id,
        arrived_at=request.state.arrived_at,
        route=origin.route,
        open_ended=False,
        background=origin.is_background,
    )
    generation = _generation(services, submits, caller, model, tokenizer, origin, deadline)
    generation.admission = admission = await admitting
    try:
        vectors = await _run(request, generation)
    except ApiError as error:
        error.headers = {**admission.headers(), **(error.headers or {})}
        raise
    if vectors is None:
        return Response(status_code=499)  # the client has gone
    content = await asyncio.to_thread(_answer, body, model, vectors, generation.usage)
    return Response(content, media_type="application/json", headers=admission.headers())


def _submits(
    body: EmbeddingRequest,
    prompts: Sequence[Sequence[int]],
    *,
    caller: Principal,
    model: ResolvedModel,
    origin: Origin,
) -> list[Submit]:
    """Returns a Submit for each prompt. Raises ApiError 400 for one that is too long."""
    scope = cache_scope(caller, body.cache_salt)
    submits: list[Submit] = []
    for prompt in prompts:
        if len(prompt) >= model.info.max_model_len:
            error = too_long(len(prompt), model.info.max_model_len)
            error.param = "input"
            raise error
        digest, start = adapter_for(prompt, model)
        submits.append(
            Submit(
                prompt_tokens=prompt,
                adapter_digest=digest,
                adapter_start=start,
                cache_scope=scope,
                tenant=caller.tenant_id,
                weight=caller.weight,
                priority=body.priority or 0,
                background=origin.is_background,
                seeds=[0],
                pooling=model.info.pooling or Pooling.POOLING_LAST,
            )
        )
    return submits


def _generation(
    services: Services,
    submits: Sequence[Submit],
    caller: Principal,
    model: ResolvedModel,
    tokenizer: ModelTokenizer,
    origin: Origin,
    deadline: float,
) -> Generation:
    return Generation(
        services.engines.open(submits, model_digest=model.info.digest, deadline=deadline),
        submits,
        info=model.info,
        tokenizer=tokenizer,
        stops=(),
        shown=frozenset(),
        reasoning=None,
        keep_stop=False,
        echo=None,
        metrics=services.metrics.request(caller.tenant_id, model.adapter_name, origin.route),
        ledger=services.ledger,
    )


async def _run(request: Request, generation: Generation) -> Sequence[bytes] | None:
    """Returns the vectors, or None when the client goes first. Raises ApiError as `Generation.next`."""
    try:
        with generation:
            async with DisconnectWatch(request.scope, request.receive, generation.close):
                while await generation.next():
                    pass
    except asyncio.CancelledError:  # see EventStream
        raise unavailable(STOPPING) from None
    return generation.vectors if generation.complete else None


def _answer(body: EmbeddingRequest, model: ResolvedModel, vectors: Sequence[bytes], usage: Usage) -> bytes:
    """Returns the answer's JSON. Takes a while where there are many."""
    import numpy as np  # here, since gateways should start quickly

    data: list[dict[str, Any]] = []
    for index, values in enumerate(vectors):
        vector = np.frombuffer(values, "<f4").astype(np.float64)[: body.dimensions]
        length = float(np.linalg.norm(vector))
        unit = (vector / length if length else vector).astype("<f4")
        shown = base64.b64encode(unit.tobytes()).decode() if body.encoding_format == "base64" else unit
        data.append({"object": "embedding", "index": index, "embedding": shown})
    tokens = usage.prompt_tokens
    answer = {
        "object": "list",
        "data": data,
        "model": model.served_name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
