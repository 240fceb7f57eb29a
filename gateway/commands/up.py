"""`loraplex up`: the whole stack on this machine."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gateway.commands.exits import CommandFailed, Exit


def up(
    model: Annotated[
        str, typer.Option(help="Base model: a .gguf file, a Hugging Face folder, or a name on the hub.")
    ],
    host: Annotated[str, typer.Option(help="Address that the gateway binds.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the gateway.")] = 8000,
    engine_port: Annotated[int, typer.Option(help="Port of the engine.")] = 50051,
    redis_port: Annotated[int, typer.Option(help="Port of the embedded Valkey.")] = 6380,
    redis_url: Annotated[
        str | None, typer.Option(help="Use this Redis or Valkey instead of an embedded one.")
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

    Example: `loraplex up --model SmolLM2-135M-Instruct.gguf -- --dtype float32 --max-num-seqs 32`
    """
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


def _report(line: str) -> None:
    try:
        typer.echo(line)
    except BrokenPipeError:
        # Whoever read our output is gone; the stack goes on without telling.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def _sole_user_of(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder itself, which leaves no file
    behind. Raises CommandFailed when another holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
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
