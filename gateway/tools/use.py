"""What a request says about tools, whichever API it came by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Calls(Enum):
    """Whether an answer may call functions."""

    FORBIDDEN = "none"
    ALLOWED = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments; None: it takes none."""
    strict: bool = False
    """Whether its arguments are held to that schema, also where no call is required."""

    def for_template(self) -> dict[str, Any]:
        """Returns what a chat template sees. Models were trained on this order of the fields."""
        parameters = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions of a request, and which calls its answer may have."""

    functions: Sequence[Function]
    calls: Calls = Calls.ALLOWED
    named: str | None = None
    """With REQUIRED: the one function to be called, once."""
    parallel: bool = True
    """Whether an answer may have several calls."""
    whole_arguments: bool = False
    """Whether arguments must be objects of JSON, also where they are held to nothing else."""

    @property
    def callable(self) -> Sequence[Function]:
        """The functions that the answer may call."""
        if self.calls is Calls.FORBIDDEN:
            return ()
        return [each for each in self.functions if self.named in (None, each.name)]

    @property
    def one_call(self) -> bool:
        """Whether the answer has one call at most."""
        return self.named is not None or not self.parallel
