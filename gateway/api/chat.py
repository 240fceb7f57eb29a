"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response

from gateway.api.answer import ENGINE_ERRORS, finish_reason_of, finite, head, token_text, tokens_of
from gateway.api.chat_calls import CallReader
from gateway.api.converse import converse, model_for
from gateway.auth import Principal, require
from gateway.bodies import read_json
from gateway.described import EVENTS, described
from gateway.generation import Piece, TokenInfo, Usage
from gateway.resolve import ResolvedModel
from gateway.schemas.answers import ChatCompletion, ChatCompletionChunk
from gateway.schemas.chat import ChatRequest
from gateway.services import Services
from gateway.sse import event
from gateway.tokenizer import ModelTokenizer
from gateway.tools.plan import ToolPlan

router = APIRouter(tags=["inference"])


@router.post("/v1/chat/completions")
@described(
    ChatCompletion,
    media={EVENTS: ChatCompletionChunk},
    body=ChatRequest,
    errors=ENGINE_ERRORS,
    headers=("X-Request-Timeout",),
)
async def create_chat_completion(
    request: Request, caller: Annotated[Principal, Depends(require("inference"))]
) -> Response:
    """Continues a conversation by one message, in `n` versions."""
    services: Services = request.app.state.services
    services.admissions.refuse_spent(caller)
    body = await read_json(request, ChatRequest)
    model, tokenizer = await model_for(request, caller, body.model, body.user)

    def form_of(plan: ToolPlan) -> ChatFormat:
        return ChatFormat(
            model,
            body.n or 1,
            tokenizer,
            plan,
            logprobs=bool(body.logprobs),
            include_usage=body.include_usage,
            include_reasoning=body.include_reasoning,
        )

    return await converse(
        request, body, form_of, caller=caller, model=model, tokenizer=tokenizer, route="chat"
    )


class ChatFormat:
    """OpenAI's `chat.completion` and `chat.completion.chunk`. See AnswerFormat."""

    def __init__(
        self,
        model: ResolvedModel,
        choices: int,
        tokenizer: ModelTokenizer,
        plan: ToolPlan,
        *,
        logprobs: bool,
        include_usage: bool,
        include_reasoning: bool,
    ) -> None:
        self._head = head("chatcmpl", "chat.completion", model)
        self._choices = choices
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._reasoning = include_reasoning
        parsers = [plan.parser() for _ in range(choices)]
        self._calls = [CallReader(parser) for parser in parsers if parser is not None]  # none, or all
        # A stream that ends with usage says `null` before.
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk"}

    @cached_property
    def _before(self) -> list[bytes]:
        """By choice, what goes before the text of a chunk that has nothing else."""
        start = orjson.dumps(self._chunk_head)[:-1]
        return [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (start, index)
            for index in range(self._choices)
        ]

    @cached_property
    def _after(self) -> bytes:
        usage = b',"usage":null' if self._tail else b""
        return b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def opening(self, usage: Usage) -> bytes:
        """See AnswerFormat: the role, for each choice."""
        delta = {"role": "assistant", "content": None if self._calls else "", "refusal": None}
        return b"".join(self._event(index, delta, None, None) for index in range(self._choices))

    def chunk(self, piece: Piece) -> bytes:
        """See AnswerFormat: text and the reason for the end are chunks of their own."""
        if not (piece.tokens or piece.reasoning or self._calls):
            data = self._before[piece.choice] + orjson.dumps(piece.text) + self._after if piece.text else b""
            if piece.finish_reason is not None:
                data += self._event(piece.choice, {}, None, piece.finish_reason)
            return data
        deltas, reason = self._deltas(piece)
        logprobs = self._logprobs_of(piece.tokens) if piece.tokens else None
        if logprobs and not deltas:
            deltas = [{}]
        data = b""
        for delta in deltas:
            data += self._event(piece.choice, delta, logprobs, None)
            logprobs = None  # all with the first
        if reason is not None:
            data += self._event(piece.choice, {}, None, reason)
        return data

    def _deltas(self, piece: Piece) -> tuple[list[dict[str, Any]], str | None]:
        """Returns what is new of a message, and the reason to tell for its end."""
        deltas: list[dict[str, Any]] = [_thought(piece.reasoning)] if self._shows(piece.reasoning) else []
        if not self._calls:
            return deltas + ([{"content": piece.text}] if piece.text else []), piece.finish_reason
        calls = self._calls[piece.choice]
        deltas += calls.of(piece.text, piece.finish_reason)
        return deltas, calls.reason_of(piece.finish_reason)

    def _shows(self, reasoning: str) -> bool:
        return self._reasoning and bool(reasoning)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        return event(self._chunk_head | {"choices": [], "usage": usage.to_dict()})

    def whole(self, pieces: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        """See AnswerFormat."""
        choices = [self._whole_choice(index, own) for index, own in enumerate(pieces)]
        return self._head | {"choices": choices, "usage": usage.to_dict()}

    def _whole_choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        text, reason = "".join(piece.text for piece in pieces), finish_reason_of(pieces)
        if self._calls:
            message, reason = self._calls[index].whole(text, reason)
        else:
            message = {"role": "assistant", "content": text, "refusal": None}
        reasoning = "".join(piece.reasoning for piece in pieces)
        if self._shows(reasoning):
            message |= _thought(reasoning)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs_of(tokens_of(pieces)) if self._logprobs else None,
            "finish_reason": reason,
        }

    def _event(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event(self._chunk_head | {"choices": [choice]} | self._tail)

    def _logprobs_of(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return {"content": [self._token_logprobs(token) for token in tokens], "refusal": None}

    def _token_logprobs(self, token: TokenInfo) -> dict[str, Any]:
        assert token.logprobs is not None, "only a prompt's first token has none"
        top = zip(token.logprobs.top_tokens, token.logprobs.top_logprobs, strict=True)
        return self._entry(token.token, token.logprobs.chosen) | {
            "top_logprobs": [self._entry(other, logprob) for other, logprob in top]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._tokenizer, token),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def _thought(reasoning: str) -> dict[str, Any]:
    """Returns what a message, or a delta, has beside its content: by the names of DeepSeek and of others."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}
