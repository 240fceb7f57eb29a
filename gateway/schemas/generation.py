"""What chat and text completions have in common in their bodies.

Fields have OpenAI's names and defaults, and vLLM's for what OpenAI lacks. Types are strict: "1" is no number.
What would change the answer but is not supported is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
_MAX_FIELDS = 128

StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


def _refuse(value: Any, info: ValidationInfo) -> None:
    if value not in (None, [], {}, "", False):
        raise PydanticCustomError(
            "unsupported", "'{name}' is not supported by this server.", {"name": info.field_name}
        )


Unsupported = Annotated[None, BeforeValidator(_refuse)]
"""A field that is known, and accepted only when it asks for nothing."""


def _check_count(value: Any, most: int) -> Any:
    if isinstance(value, list | dict) and len(value) > most:
        raise PydanticCustomError("too_many", "it may have at most {most} entries", {"most": most})
    return value


def at_most(count: int) -> BeforeValidator:
    """Returns the bound for a list or an object, which is checked before its entries are.

    pydantic's own bounds come after, and it makes a fault of each bad entry: a body of millions would hold up
    every other request for seconds.
    """
    return BeforeValidator(lambda value: _check_count(value, count))


def fault(field: str, reason: str) -> PydanticCustomError:
    """Returns the error to raise in a model's validator when `field` does not fit the others."""
    return PydanticCustomError("field_conflict", "{reason}", {"field": field, "reason": reason})


class StrictModel(BaseModel):
    """A body, or a part of one, that takes no unknown fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        return _check_count(value, _MAX_FIELDS)


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationFields(StrictModel):
    """How to generate: everything but the prompt and the number of tokens."""

    model: str = Field(min_length=1, max_length=256)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: Annotated[StopString | list[StopString] | None, at_most(MAX_STOPS)] = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**32, description="0 and -1: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logit_bias: Annotated[dict[str, float] | None, at_most(1024)] = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId] | None, at_most(64)] = None
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Narrows who shares cached prefixes."
    )
    user: str | None = None
    metadata: Annotated[dict[str, str] | None, at_most(64)] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options", "it needs 'stream': true")
        for token, value in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise fault("logit_bias", f"'{token[:32]}' is not a token id")
            if not -100 <= value <= 100:
                raise fault("logit_bias", "biases must lie between -100 and 100")
        return self

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage
