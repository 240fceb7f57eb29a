"""The fields with which a body says what its answer must fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from gateway.schemas.generation import AtMost, GenerationFields, StrictModel, fault

_LONGEST = 65_536
_MOST_CHOICES = 1024
_GUIDED = tuple((f"guided_{kind}", kind) for kind in ("json", "regex", "choice", "grammar"))

_Text = Annotated[str, StringConstraints(min_length=1, max_length=_LONGEST)]
_Choice = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Schema = dict[str, Any] | bool


class FreeText(StrictModel):
    """Anything."""

    type: Literal["text"]


class AnyObject(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON schema, as OpenAI wraps it."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema", description="Without one: any JSON object.")
    strict: bool | None = Field(None, description="Answers always fit the schema, whatever this says.")


class JsonSchema(StrictModel):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[FreeText | AnyObject | JsonSchema, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must fit: `value`'s form depends on `kind` (object, json, regex, choice, grammar)."""

    param: str
    """The body's field, for errors."""
    kind: str
    value: Any


class StructureFields(GenerationFields):
    """OpenAI's `response_format`, and vLLM's names for what that cannot say. At most one of them counts."""

    response_format: ResponseFormat | None = Field(None, description="What the answer must fit.")
    guided_json: Schema | None = Field(None, description="A JSON schema that the answer must fit.")
    guided_regex: _Text | None = Field(None, description="A regular expression that all of it must match.")
    guided_choice: Annotated[list[_Choice], AtMost(_MOST_CHOICES), Field(min_length=1)] | None = Field(
        None, description="The answer is one of these."
    )
    guided_grammar: _Text | None = Field(
        None, description="A grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF."
    )

    @model_validator(mode="after")
    def _one_structure(self) -> StructureFields:
        asked = self._asked()
        if asked and self.use_beam_search:
            raise fault(asked[0].param, "it cannot be used with 'use_beam_search'")
        if len(asked) > 1:
            raise fault(asked[1].param, f"it excludes '{asked[0].param}'")
        return self

    @property
    def structure(self) -> Structure | None:
        """What the answer must fit; None: anything."""
        asked = self._asked()
        return asked[0] if asked else None

    def _asked(self) -> list[Structure]:
        found = [
            Structure(name, kind, value)
            for name, kind in _GUIDED
            if (value := getattr(self, name)) is not None
        ]
        wanted = self.response_format
        if isinstance(wanted, JsonSchema) and wanted.json_schema.schema_ is not None:
            schema = wanted.json_schema.schema_
            found.append(Structure("response_format.json_schema.schema", "json", schema))
        elif isinstance(wanted, AnyObject | JsonSchema):
            found.append(Structure("response_format", "object", None))
        return found
