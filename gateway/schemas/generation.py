"""What chat and text completions have in common in their bodies.

Fields have OpenAI's names and defaults, and vLLM's for what OpenAI lacks. Types are strict: "1" is no number.
What would change the answer but is not supported is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
_MAX_FIELDS = 128
_MODEL = "The base model, `name`, `name@version`, `name@live`, or `owner/name` for a granted one."

_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "stop": (None, []),
    "min_tokens": (None, 0),
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
}
"""What nothing may be asked of where answers are searched for, with the values that ask for nothing."""

StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
LogitBias = Annotated[float, WithJsonSchema({"type": "number", "minimum": -100, "maximum": 100})]


def _refuse(value: Any, info: ValidationInfo) -> None:
    if not (value is None or value is False or value in ([], {}, "")):
        raise PydanticCustomError(
            "unsupported", "'{name}' is not supported by this server.", {"name": info.field_name}
        )


Unsupported = Annotated[
    None,
    BeforeValidator(_refuse),
    WithJsonSchema({"enum": [None, False, "", [], {}], "description": "Not supported: refused when used."}),
]
"""A field that is known, and accepted only when it asks for nothing."""


def _check_count(value: Any, most: int) -> Any:
    if isinstance(value, list | dict) and len(value) > most:
        raise PydanticCustomError("too_many", "it may have at most {most} entries", {"most": most})
    return value


@dataclass(frozen=True, slots=True)
class AtMost:
    """The bound for a list or an object, which is checked before its entries are.

    pydantic's own bounds come after, and it makes a fault of each bad entry: a body of millions would hold up
    every other request for seconds.
    """

    count: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: _check_count(value, self.count), handler(source)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = handler(schema)
        for kind in found.get("anyOf", [found]):
            bound = {"array": "maxItems", "object": "maxProperties"}.get(kind.get("type"))
            if bound:
                kind[bound] = self.count
        return found


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

    model: str = Field(min_length=1, max_length=256, description=_MODEL, examples=["sql", "sql@3"])
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices; 1 by default.")
    stream: bool | None = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Needs `stream`.")
    stop: Annotated[StopString | list[StopString] | None, AtMost(MAX_STOPS)] = Field(
        None, description="The answer ends before the first of these."
    )
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of a choice.")
    min_tokens: int | None = Field(None, ge=0, description="Least tokens of a choice.")
    temperature: float | None = Field(None, ge=0, le=2, description="0: greedy; 1 by default.")
    top_p: float | None = Field(
        None, ge=0, le=1, description="The most likely tokens, up to this probability."
    )
    top_k: int | None = Field(
        None, ge=-1, lt=2**32, description="The most likely tokens, this many; 0 and -1: off."
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="Tokens at least this likely, relative to the best."
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Taken off the logits of tokens that the answer has."
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="The same, times how often it has them."
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=10, description="Above 1: makes tokens that occurred less likely, the prompt's too."
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same seed, prompt and model give the same answer."
    )
    logit_bias: Annotated[dict[str, LogitBias] | None, AtMost(1024)] = Field(
        None,
        description="By token id, what is added to its logit.",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Let the text end with the stop string that has ended it, not before."
    )
    ignore_eos: bool | None = Field(None, description="Go on past the model's own end tokens.")
    stop_token_ids: Annotated[list[TokenId] | None, AtMost(64)] = Field(
        None, description="Further end tokens."
    )
    use_beam_search: bool | None = Field(
        None, description="Search for the most likely answers as wholes, with as many beams as are generated."
    )
    length_penalty: float | None = Field(
        None, ge=-10, le=10, description="An answer's logprob is divided by its length to this power; 1."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="When a search ends, as transformers' `generate` has it; false."
    )
    priority: int | None = Field(
        None, ge=-100, le=100, description="Lower is sooner, among the tenant's own requests; 0."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Narrows who shares cached prefixes."
    )
    user: str | None = Field(None, description="While a canary runs, the same user meets the same version.")
    metadata: Annotated[dict[str, str] | None, AtMost(64)] = Field(None, description="Changes nothing.")

    @model_validator(mode="after")
    def _fields_agree(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options", "it needs 'stream': true")
        self._check_beams()
        for token, value in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise fault("logit_bias", f"'{token[:32]}' is not a token id")
            if not -100 <= value <= 100:
                raise fault("logit_bias", "biases must lie between -100 and 100")
        return self

    def _check_beams(self) -> None:
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) is not None:
                    raise fault(name, "it needs 'use_beam_search': true")
            return
        for name, off in _NOT_WITH_BEAMS.items():
            if getattr(self, name) not in off:
                raise fault(name, "it cannot be used with 'use_beam_search'")

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def drawn_choices(self) -> int:
        """How many answers are generated for each prompt; at least those that it gets."""
        return self.n or 1

    @property
    def open_ended(self) -> bool:
        """Whether the client leaves it to the model how long the answer becomes."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage
