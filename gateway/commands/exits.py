"""How a command ends when it fails: one sentence and an exit code that scripts can use."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, the same as those of the `adapters` command."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_AUTHORISED = 4
    NOT_FOUND = 5


class CommandFailed(Exception):
    """Ends the command with this message and exit code."""

    def __init__(self, message: str, exit_code: Exit) -> None:
        super().__init__(message)
        self.exit_code = exit_code
