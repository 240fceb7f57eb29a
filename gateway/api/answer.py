"""What chat and text completions share on the way out: a
generation becomes one JSON object, or a stream of chunks.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

import orjson
from fastapi import Request, Response

from gateway.auth import Principal
from gateway.beam_stream import ask_for_beams
from gateway.best_of import best_choices
from gateway.deadlines import deadline_of
from gateway.disconnects import DisconnectWatch
from gateway.echo import Echo
from gateway.errors import ApiError, unavailable
from gateway.generation import Generation, Piece, TokenInfo, Usage
from gateway.origin import origin_of
from gateway.reasoning import Reasoning
from gateway.resolve import ResolvedModel
from gateway.schemas.generation import GenerationFields
from gateway.services import Services
from gateway.sse import STOPPING, EventStream
from gateway.tokenizer import ModelTokenizer
from gateway.whole_answer import WholeAnswer
from protos.engine_pb2 import Submit

ENGINE_ERRORS = (404, 500, 504)
"""What a request that reaches an engine may end in, beside what every request may."""

_LEAST_LOGPROB = -9999.0
_FEW_TOKENS = 1000
"""With logprobs: so many are written on the event loop, more in a thread."""


class AnswerFormat(Protocol):
    """How an answer looks on one route."""

    def opening(self, usage: Usage) -> bytes:
        """Returns the chunks that go before any text; `usage` is the prompt's."""
        ...

    def chunk(self, piece: Piece) -> bytes:
        """Returns the chunks for what is new of a choice."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """Returns the last chunk, when the client asked for usage."""
        ...

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed; `pieces[i]` are those of choice i."""
        ...


async def generate(
    request: Request,
    body: GenerationFields,
    make_form: Callable[[], AnswerFormat],
    submits: Sequence[Submit],
    *,
    caller: Principal,
    model: ResolvedModel,
    tokenizer: ModelTokenizer,
    route: str,
    shown: frozenset[int] = frozenset(),
    reasoning: Reasoning | None = None,
    echo: Echo | None = None,
) -> Response:
    """Runs the submits of a body, if the caller's limits allow it, and answers in the form that `make_form`
    returns, which must not fail.

    `route` is for the metrics and the ledger; `shown` are special tokens that the form is to see, and
    `reasoning` says that some of an answer may be thought; `echo` puts the prompts before their answers.
    Raises ApiError as `Admissions.admit`, and for what fails before the first token.
    """
    services: Services = request.app.state.services
    if body.use_beam_search:
        ask_for_beams(body, submits, model.info)
    origin = origin_of(request, route)
    for submit in submits:
        submit.background = origin.is_background
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
        open_ended=body.open_ended,
        background=origin.is_background,
    )
    generation = Generation(
        services.engines.open(submits, model_digest=model.info.digest, deadline=deadline),
        submits,
        info=model.info,
        tokenizer=tokenizer,
        stops=body.stop_strings,
        shown=shown,
        reasoning=reasoning,
        keep_stop=bool(body.include_stop_str_in_output),
        echo=echo,
        metrics=services.metrics.request(caller.tenant_id, model.adapter_name, origin.route),
        ledger=services.ledger,
    )
    form = make_form()
    generation.admission = admission = await admitting
    choices = sum(len(submit.seeds) for submit in submits)
    try:
        return await _answer(request, generation, form, body, choices=choices)
    except ApiError as error:
        error.headers = {**admission.headers(), **(error.headers or {})}
        raise


async def _answer(
    request: Request, generation: Generation, form: AnswerFormat, body: GenerationFields, *, choices: int
) -> Response:
    """Runs a generation of so many choices, over all prompts, to its end, or until the client goes. A stream
    has all of them. Raises ApiError for what fails before the first token.
    """
    try:
        if not body.stream:
            return await _answer_whole(request, generation, form, body, choices)
        events = _events(generation, form, body.include_usage)
        async with DisconnectWatch(request.scope, request.receive, generation.close):
            first = await anext(events)
    except asyncio.CancelledError:  # see EventStream
        raise unavailable(STOPPING) from None
    response = EventStream(first, events, on_disconnect=generation.close)
    response.raw_headers += generation.admission.raw_headers()
    return response


async def _answer_whole(
    request: Request, generation: Generation, form: AnswerFormat, body: GenerationFields, choices: int
) -> Response:
    """Of the choices that were made for a prompt, the best are the answer: of a search, which has them in
    order, the first.
    """
    collected: list[list[Piece]] = [[] for _ in range(choices)]
    with generation:
        await asyncio.sleep(0)  # what follows is done while the engine's link sends it, and the engine works
        headers = generation.admission.raw_headers()
        async with DisconnectWatch(request.scope, request.receive, generation.close):
            while pieces := await generation.next():
                for piece in pieces:
                    collected[piece.choice].append(piece)
    if not generation.complete:
        return Response(status_code=499)  # nginx's number for a client that has gone; nobody reads it
    keep, of = body.n or 1, body.drawn_choices
    if keep < of:
        scores = [
            -index if body.use_beam_search else generation.mean_logprob(index) for index in range(choices)
        ]
        collected = best_choices(collected, scores, of=of, keep=keep)

    def content() -> bytes:
        return orjson.dumps(form.whole(collected, generation.usage))

    are_few = sum(len(piece.tokens) for own in collected for piece in own) <= _FEW_TOKENS
    data = content() if are_few else await asyncio.to_thread(content)
    response = WholeAnswer(data, media_type="application/json")
    response.raw_headers += headers
    return response


async def _events(generation: Generation, form: AnswerFormat, include_usage: bool) -> AsyncGenerator[bytes]:
    """Yields each write of a stream but the closing mark. The generation ends with this generator."""
    with generation:
        await generation.start()
        yield form.opening(generation.usage)
        while pieces := await generation.next():
            if sum([len(piece.tokens) for piece in pieces]) <= _FEW_TOKENS:
                yield b"".join([form.chunk(piece) for piece in pieces])
            else:
                yield await asyncio.to_thread(lambda pieces=pieces: b"".join(map(form.chunk, pieces)))
        if include_usage:
            yield form.usage_chunk(generation.usage)


def head(prefix: str, kind: str, model: ResolvedModel) -> dict[str, Any]:
    """Returns what an answer and all chunks of it begin with. The same seed gives the same answer while
    `system_fingerprint` stays the same.
    """
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model.served_name,
        "system_fingerprint": f"fp_{model.info.digest.hex()[:12]}",
    }


def finish_reason_of(pieces: list[Piece]) -> str | None:
    """Returns why a choice ended."""
    return pieces[-1].finish_reason if pieces else None


def tokens_of(pieces: list[Piece]) -> list[TokenInfo]:
    """Returns a choice's tokens with their logprobs."""
    return [token for piece in pieces for token in piece.tokens]


def token_text(tokenizer: ModelTokenizer, token: int) -> str:
    """Returns a token as text; bytes that are no whole character become U+FFFD."""
    return tokenizer.token_bytes(token).decode(errors="replace")


def finite(logprob: float) -> float:
    """Returns a logprob as JSON can hold it; OpenAI writes -9999 for what cannot happen."""
    return max(logprob, _LEAST_LOGPROB)
