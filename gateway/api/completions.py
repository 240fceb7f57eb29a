"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response

from gateway.api.answer import ENGINE_ERRORS, finish_reason_of, finite, generate, head, token_text, tokens_of
from gateway.auth import Principal, require
from gateway.bodies import read_json
from gateway.described import EVENTS, described
from gateway.echo import Echo, EchoedPrompt, echoed_prompt
from gateway.errors import invalid_request
from gateway.generation import Piece, TokenInfo, Usage
from gateway.grammars import grammar_of
from gateway.prompts import prompts_of
from gateway.resolve import ResolvedModel
from gateway.schemas.answers import TextCompletion, TextCompletionChunk
from gateway.schemas.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from gateway.services import Services
from gateway.sse import event
from gateway.submission import build_submits
from gateway.tokenizer import ModelTokenizer
from protos.engine_pb2 import TokenLogprobs

router = APIRouter(tags=["inference"])

MAX_ECHOED = 2**20
"""Logprobs of prompts that one answer may hold: each choice repeats those of its prompt, at no cost else."""
MAX_ECHOED_TEXT = 2**20
"""Characters of prompts that one answer may hold, over all choices."""
_SHORT_TOKENS = 1000
"""Echoed prompts that become text on the event loop."""


@router.post("/v1/completions")
@described(
    TextCompletion,
    media={EVENTS: TextCompletionChunk},
    body=CompletionRequest,
    errors=ENGINE_ERRORS,
    headers=("X-Request-Timeout",),
)
async def create_completion(
    request: Request, caller: Annotated[Principal, Depends(require("inference"))]
) -> Response:
    """Continues each prompt, in `n` versions: choice i belongs to prompt i // n."""
    services: Services = request.app.state.services
    services.admissions.refuse_spent(caller)
    body = await read_json(request, CompletionRequest)
    model = await services.models.resolve(body.model, caller, user=body.user)
    services.admissions.refuse_spent(caller, model.adapter_name)
    services.models.announce(model)
    tokenizer = await services.own_tokenizers.of(model)
    prompts = await prompts_of(body.prompts, tokenizer, model)
    _check_echoed_logprobs(body, prompts)
    submits = build_submits(
        body,
        prompts,
        model=model,
        caller=caller,
        max_tokens=_limit_of(body),
        logprobs=body.logprobs,
        end_tokens=tokenizer.end_tokens,
        grammar=await grammar_of(body),
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    choices = len(prompts) * (body.n or 1)

    def make_form() -> CompletionFormat:
        return CompletionFormat(
            model, choices, tokenizer, logprobs=body.logprobs is not None, include_usage=body.include_usage
        )

    return await generate(
        request,
        body,
        make_form,
        submits,
        caller=caller,
        model=model,
        tokenizer=tokenizer,
        route="completions",
        echo=await _echo_of(body, prompts, tokenizer) if body.echo else None,
    )


def _limit_of(body: CompletionRequest) -> int:
    """OpenAI's default of 16 tokens gives way to a larger `min_tokens`."""
    return max(DEFAULT_MAX_TOKENS, body.min_tokens or 0) if body.max_tokens is None else body.max_tokens


def _check_echoed_logprobs(body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ApiError 400 for more logprobs of prompts than an answer may hold."""
    if not body.echo or body.logprobs is None:
        return
    count = sum(map(len, prompts)) * body.drawn_choices * (1 + body.logprobs)
    if count > MAX_ECHOED:
        raise invalid_request(
            f"With 'echo' the answer would hold {count:,} logprobs of prompts, more than {MAX_ECHOED:,}. Ask "
            "for fewer choices or alternatives, or send the prompts one by one.",
            param="logprobs",
        )


async def _echo_of(
    body: CompletionRequest, prompts: Sequence[Sequence[int]], tokenizer: ModelTokenizer
) -> Echo:
    """Raises ApiError 400 for more text of prompts than an answer may hold."""

    def echoed() -> list[EchoedPrompt]:
        pairs = zip(body.prompts, prompts, strict=True)
        return [echoed_prompt(given, tokens, tokenizer) for given, tokens in pairs]

    is_short = sum(map(len, prompts)) <= _SHORT_TOKENS
    made = echoed() if is_short else await asyncio.to_thread(echoed)
    count = sum(len(prompt.text) for prompt in made) * (body.n or 1)
    if count > MAX_ECHOED_TEXT:
        raise invalid_request(
            f"With 'echo' the answer would hold {count:,} characters of prompts, more than "
            f"{MAX_ECHOED_TEXT:,}. Ask for fewer choices, or send the prompts one by one.",
            param="echo",
        )
    return Echo(made, body.drawn_choices, with_logprobs=body.logprobs is not None)


class CompletionFormat:
    """OpenAI's `text_completion`, whole and in chunks. See AnswerFormat."""

    def __init__(
        self,
        model: ResolvedModel,
        choices: int,
        tokenizer: ModelTokenizer,
        *,
        logprobs: bool,
        include_usage: bool,
    ) -> None:
        self._head = head("cmpl", "text_completion", model)
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        # A stream that ends with usage says `null` before. The text is put between two parts made once.
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}
        start = orjson.dumps(self._head)[:-1]
        self._before = [
            b'data: %b,"choices":[{"index":%d,"text":' % (start, index) for index in range(choices)
        ]
        self._after = (
            b',"logprobs":null,"finish_reason":null}]'
            + (b',"usage":null' if include_usage else b"")
            + b"}\n\n"
        )

    def opening(self, usage: Usage) -> bytes:
        """See AnswerFormat: nothing goes before the text."""
        return b""

    def chunk(self, piece: Piece) -> bytes:
        """See AnswerFormat: the reason for the end goes with the last text."""
        if not piece.tokens and piece.finish_reason is None:
            return self._before[piece.choice] + orjson.dumps(piece.text) + self._after
        choice = self._choice(piece.choice, piece.text, list(piece.tokens), piece.finish_reason)
        return event(self._head | {"choices": [choice]} | self._tail)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        return event(self._head | {"choices": [], "usage": usage.to_dict()})

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        """See AnswerFormat."""
        choices = [
            self._choice(index, "".join(piece.text for piece in own), tokens_of(own), finish_reason_of(own))
            for index, own in enumerate(pieces)
        ]
        return self._head | {"choices": choices, "usage": usage.to_dict()}

    def _choice(self, index: int, text: str, tokens: list[TokenInfo], reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs_of(tokens) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs_of(self, tokens: list[TokenInfo]) -> dict[str, Any]:
        return {
            "tokens": [token_text(self._tokenizer, token.token) for token in tokens],
            "token_logprobs": [token.logprobs and finite(token.logprobs.chosen) for token in tokens],
            "top_logprobs": [token.logprobs and self._top(token.token, token.logprobs) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """Returns the alternatives by text, and the token itself, as OpenAI does. Of different tokens with
        one text, the most likely counts.
        """
        pairs = [*zip(logprobs.top_tokens, logprobs.top_logprobs, strict=True), (token, logprobs.chosen)]
        found: dict[str, float] = {}
        for other, logprob in pairs:
            text = token_text(self._tokenizer, other)
            found[text] = max(finite(logprob), found.get(text, finite(logprob)))
        return found
