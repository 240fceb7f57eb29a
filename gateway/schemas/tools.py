"""Tools as OpenAI's chat completions have them: what may be called, what must be, and calls that were."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.schemas.generation import AtMost, StrictModel, fault
from gateway.tools.use import Function

MAX_TOOLS = 128
MAX_CALLS = 128

_CLIENTS_OWN = "Left there by clients that parse or stream; changes nothing."

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(StrictModel):
    """A function, and what it takes."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of its arguments; without one it takes none."
    )
    strict: bool | None = Field(
        False, description="Hold the arguments to the schema, and refuse what cannot be."
    )

    @model_validator(mode="after")
    def _takes_an_object(self) -> FunctionDefinition:
        if (self.parameters or {}).get("type", "object") != "object":
            raise fault("parameters", "its 'type' must be \"object\"")
        return self


class Tool(StrictModel):
    """Something that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def to_function(self) -> Function:
        """Returns the function as the rest of the gateway knows it."""
        given = self.function
        return Function(given.name, given.description, given.parameters, strict=bool(given.strict))


class FunctionReference(StrictModel):
    """A function by its name."""

    name: FunctionName


class NamedTool(StrictModel):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: FunctionReference


# The tags are named as pydantic names members of unions, which errors leave out of a field's path.
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedTool, Tag("dict")],
    Discriminator(lambda value: "dict" if isinstance(value, dict | NamedTool) else "str"),
]


class CalledFunction(StrictModel):
    """What was called, and with what."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = Field(description="JSON, as the model wrote it.")
    parsed_arguments: Any = Field(None, description=_CLIENTS_OWN)


class ToolCall(StrictModel):
    """A call that the assistant has made."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction
    index: int | None = Field(None, description=_CLIENTS_OWN)

    def for_template(self) -> dict[str, Any]:
        """Returns what a chat template sees, but for the arguments, which are text yet."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


Tools = Annotated[list[Tool], AtMost(MAX_TOOLS)]
ToolCalls = Annotated[list[ToolCall], AtMost(MAX_CALLS)]
