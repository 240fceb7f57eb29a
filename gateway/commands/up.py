"""`loraplex up`: the whole stack on this machine."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gateway.commands.exits import CommandFailed, Exit

_LAST_PORT = 65_535
_OWN_FLAGS = {
    "--model": "write --model before the '--'",
    "--port": "choose it with --engine-port",
    "--host": "to serve other machines, run `loraplex engine` beside this",
    "--redis-url": "write --redis-url before the '--'",
    "--store": "it lies in --data-dir",
}
"""Flags that the engine has from here, and what to do in their place."""


def up(
    model: Annotated[
        str,
        typer.Option(
            envvar="LORAPLEX_ENGINE_MODEL",
            help="Base model: a .gguf file, a Hugging Face folder, or a name on the hub.",
        ),
    ],
    host: Annotated[
        str, typer.Option(envvar="LORAPLEX_HOST", help="Address that the gateway binds.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="LORAPLEX_PORT", min=1, max=_LAST_PORT, help="Port of the gateway.")
    ] = 8000,
    engine_port: Annotated[
        int, typer.Option(envvar="LORAPLEX_ENGINE_PORT", min=1, max=_LAST_PORT, help="Port of the engine.")
    ] = 50051,
    redis_port: Annotated[
        int, typer.Option(min=1, max=_LAST_PORT, help="Port of the embedded Valkey.")
    ] = 6380,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_REDIS_URL", help="Use this Redis or Valkey instead of an embedded one."
        ),
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(help="Folder of all that is kept: keys, tenants, adapters.")
    ] = Path("var"),
    engine_args: Annotated[
        list[str] | None,
        typer.Argument(help="Flags for the engine, after '--'.", metavar="[-- ENGINE FLAGS]"),
    ] = None,
) -> None:
    """Start the whole stack: Valkey, an engine and a gateway, until Ctrl-C.

    The first start prints the operator's key, unless LORAPLEX_OPERATOR_KEY holds one. What dies is started
    again; tenants, keys and adapters outlive everything in the data folder.

    Gateway and engine take their other variables from the environment, but for LORAPLEX_STORE and
    LORAPLEX_JOURNAL, which lie in the data folder, and LORAPLEX_ENGINE_HOST, which is 127.0.0.1.

    Example: `loraplex up --model SmolLM2-135M-Instruct.gguf -- --dtype float32 --max-num-seqs 32`
    """
    _check_engine_args(engine_args or [])
    from gateway.stack import StackError, StackPlan, check_ports, run_stack

    plan = StackPlan(
        model=model,
        host=host,
        port=port,
        engine_port=engine_port,
        redis_port=redis_port,
        redis_url=redis_url,
        data_dir=data_dir,
        engine_args=tuple(engine_args or ()),
    )
    try:
        check_ports(plan)
        with _sole_user_of(data_dir):
            asyncio.run(run_stack(plan, _report))
    except StackError as error:
        raise CommandFailed(str(error), Exit.REFUSED) from None


def _check_engine_args(engine_args: Sequence[str]) -> None:
    """Raises CommandFailed for a flag by which the engine would not be where it is looked for."""
    for argument in engine_args:
        flag = argument.partition("=")[0]
        if flag in _OWN_FLAGS:
            message = f"The engine's {flag} is set by `loraplex up`: {_OWN_FLAGS[flag]}."
            raise CommandFailed(message, Exit.USAGE)


def _report(line: str) -> None:
    try:
        typer.echo(line)
    except BrokenPipeError:
        # Whoever read our output is gone; the stack goes on without telling.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def _sole_user_of(folder: Path) -> Iterator[None]:
    """Makes the folder and holds a lock on it, which leaves no file behind. Raises CommandFailed when it
    cannot be made, or another holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        message = f"The folder '{folder}' cannot be used ({reason}). Choose another with --data-dir."
        raise CommandFailed(message, Exit.REFUSED) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = (
                f"Another stack runs on the folder '{folder}'. Stop it, or choose another with --data-dir."
            )
            raise CommandFailed(message, Exit.REFUSED) from None
        yield
    finally:
        os.close(handle)
