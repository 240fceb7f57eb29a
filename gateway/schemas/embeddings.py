"""The body of `POST /v1/embeddings`, and what it answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from gateway.schemas.answers import ServedModel
from gateway.schemas.completion import Tokens
from gateway.schemas.generation import StrictModel

MAX_INPUTS = 2048
_MODEL = "The base model, `name`, `name@version`, `name@live`, or `owner/name` for a granted one."
_Several = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)


class EmbeddingRequest(StrictModel):
    """One or more texts, or their token ids, to be made vectors of."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "sql", "input": "How many users are there?"},
                {"model": "sql", "input": [[1, 2, 3], [4]], "encoding_format": "base64", "dimensions": 4},
            ]
        }
    )

    model: str = Field(min_length=1, max_length=256, description=_MODEL, examples=["sql", "sql@3"])
    input: str | Tokens | Annotated[list[str], _Several] | Annotated[list[Tokens], _Several] = Field(
        description=f"A text, token ids, or a list of either, of up to {MAX_INPUTS}."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`float` by default; `base64` is of float32, little-endian."
    )
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="The first so many numbers, normalised again; all by default."
    )
    user: str | None = Field(None, description="While a canary runs, the same user meets the same version.")
    priority: int | None = Field(
        None, ge=-100, le=100, description="Lower is sooner, among the tenant's own requests; 0."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Narrows who shares cached prefixes."
    )

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """All inputs, each a text or a list of token ids."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [given]  # type: ignore[list-item]
        return given  # type: ignore[return-value]


class Embedding(TypedDict):
    """The vector of one input, of length 1."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Field(description="As `encoding_format` says.")]


class EmbeddingUsage(TypedDict):
    """What a request has cost, in tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """A vector for each input, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: ServedModel
    usage: EmbeddingUsage
