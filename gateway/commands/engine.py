"""`loraplex engine`: an engine process, in place of this one."""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from gateway.commands.exits import CommandFailed, Exit

PASS_ALL = {"allow_extra_args": True, "ignore_unknown_options": True}


def engine(context: typer.Context) -> None:
    """Run an engine: one base model on this machine's GPU or CPU.

    All flags go to the engine itself; see `loraplex engine --help`.
    """
    # A gateway's installation may lack it, and must never import it: only ask whether it is there.
    if importlib.util.find_spec("torch") is None:
        raise CommandFailed(
            "An engine needs PyTorch, which is not installed. Install 'loraplex[engine]'.", Exit.USAGE
        )
    os.execv(sys.executable, [sys.executable, "-m", "engine", *context.args])
