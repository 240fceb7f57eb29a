"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from gateway.schemas.generation import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    TokenId,
    Unsupported,
    fault,
)
from gateway.schemas.structure import StructureFields

DEFAULT_MAX_TOKENS = 16

# The first bad entry is enough: of millions, each would be a fault.
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Several = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)


class CompletionRequest(StructureFields):
    """One or more prompts, as text or as token ids, to be continued."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "sql", "prompt": "SELECT", "max_tokens": 8, "temperature": 0, "logprobs": 2},
                {"model": "sql", "prompt": [[1, 2, 3], [4, 5, 6]], "n": 2, "stream": True},
            ]
        }
    )

    prompt: str | Tokens | Annotated[list[str], _Several] | Annotated[list[Tokens], _Several] = Field(
        description="A text, token ids, or a list of either."
    )
    max_tokens: int | None = Field(
        None, ge=0, description="Most tokens of a choice; 16 by default, and none only with `echo`."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="Alternatives a token.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Generate so many, and give the `n` most likely by the mean over their tokens.",
    )
    echo: bool | None = Field(None, description="Begin each choice with its prompt, its logprobs included.")
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _completion_fields_agree(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise fault("best_of", "it must be at least 'n'")
        if self.stream and self.drawn_choices > (self.n or 1):
            raise fault("best_of", "only at the end it is known which are the best: it excludes 'stream'")
        if len(self.prompts) * self.drawn_choices > MAX_CHOICES:
            name = "n" if self.best_of is None else "best_of"
            raise fault(name, f"prompts times '{name}' must be at most {MAX_CHOICES}")
        if self.max_tokens == 0 and self.use_beam_search:
            raise fault("max_tokens", "a search needs at least one")
        if self.max_tokens == 0 and not self.echo:
            raise fault("max_tokens", "it may be 0 only with 'echo': true")
        return self

    @property
    def drawn_choices(self) -> int:
        """See GenerationFields."""
        return self.best_of or self.n or 1

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, each a text or a list of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return prompt  # type: ignore[return-value]
