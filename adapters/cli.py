"""The `adapters` command: everything that a tenant does with adapters on a gateway, or checks before."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from adapters.check import check
from adapters.client import ClientError, Exit
from adapters.commands import aliases, contents, grants, store
from adapters.commands.shared import (
    DEFAULT_URL,
    AllowZero,
    ApiKey,
    AsJson,
    Name,
    NewName,
    Promote,
    Url,
    connect,
    meaning,
    print_json,
    print_versions,
    progress_bar,
)
from adapters.errors import InvalidAdapter
from adapters.identity import InvalidName, check_name
from adapters.model_ref import parse_own_ref
from adapters.precheck import precheck
from adapters.upload_client import LocalAdapter

_HELP = """Check, upload, version, share and delete LoRA adapters on a Loraplex gateway.

The server and key come from --url and --api-key of each command, or from LORAPLEX_URL and LORAPLEX_API_KEY.
"""
_EXIT_CODES = (
    "Exit codes: 0 done; 1 refused by the server, or not a valid adapter; 2 wrong usage; 3 the server cannot "
    "be reached; 4 the key is not accepted; 5 there is no such adapter."
)

app = typer.Typer(
    name="adapters",
    help=_HELP,
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for command in (
    check,
    aliases.promote,
    aliases.rollback,
    aliases.canary,
    aliases.history,
    contents.diff,
    contents.download,
    aliases.pin,
    aliases.unpin,
    aliases.rename,
    grants.grant,
    grants.revoke,
    store.pull,
    store.reindex,
):
    app.command()(command)


@app.command()
def upload(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help=f"The folder that PEFT's save_pretrained wrote, with {CONFIG_FILE} and {WEIGHTS_FILE}.",
        ),
    ],
    name: NewName,
    allow_zero: AllowZero = False,
    promote: Promote = True,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Upload an adapter as a new version of a name, which then means this version.

    An upload that broke off goes on where it was when the same command is run again. Files that you have
    uploaded before are not sent.

    Example: adapters upload ./pirate --name pirate
    """
    check_name(name)
    precheck(folder)
    total = LocalAdapter(folder, name).nbytes
    with connect(url, api_key) as client, progress_bar() as progress:
        task = progress.add_task(f"uploading {name}", total=total)

        def on_sent(count: int) -> None:
            progress.advance(task, count)
            if progress.finished:
                progress.update(task, description=f"checking {name}")

        adapter = client.upload(folder, name, allow_zero=allow_zero, promote=promote, on_sent=on_sent)
    if as_json:
        print_json(adapter)
    else:
        typer.echo(
            f"{adapter['id']}: rank {adapter['rank']}, {decimal(adapter['bytes'])}, on "
            f"{', '.join(adapter['target_modules'])}"
        )
        if not promote:
            typer.echo(f"not live yet; make it so with: adapters promote {name} {adapter['version']}")


@app.command("list")
def list_adapters(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List your adapters, each with the version that its name means."""
    with connect(url, api_key) as client:
        answer = client.list()
    if as_json:
        print_json(answer)
    elif answer["data"]:
        print_versions(answer["data"])
    else:
        typer.echo("no adapters; upload one with: adapters upload DIR --name NAME")


@app.command()
def show(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Show what an adapter's name means, its versions, whom it is shared with, and where it is loaded."""
    check_name(name)
    with connect(url, api_key) as client:
        adapter = client.show(name)
    if as_json:
        print_json(adapter)
        return
    typer.echo(f"{adapter['id']}  sha256:{adapter['digest']}")
    typer.echo(meaning(adapter))
    print_versions(adapter["versions"])
    if adapter["grants"]:
        typer.echo(f"shared with {', '.join(adapter['grants'])}")
    for engine, state in sorted(adapter["engines"].items()):
        typer.echo(_state_line(engine, state))


@app.command()
def delete(
    ref: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Without a version: all of them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Delete an adapter with all its versions, or one version that is not live. Asks first."""
    _, version = parse_own_ref(ref)
    if not yes:
        what = f"Delete '{ref}' with all its versions?" if version is None else f"Delete '{ref}'?"
        typer.confirm(what, abort=True, err=True)
    with connect(url, api_key) as client:
        answer = client.delete(ref)
    print_json(answer) if as_json else typer.echo(f"deleted {ref}")


for _command in app.registered_commands:
    _command.epilog = _EXIT_CODES


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and ends the process with an exit code; every failure is one line on stderr."""
    try:
        app(args=arguments)
    except InvalidName as error:
        _fail(str(error), Exit.USAGE)
    except InvalidAdapter as error:
        _fail(error.message, Exit.REFUSED)
    except ClientError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(f"Cannot read {error.filename}: {error.strerror}.", Exit.REFUSED)


def _state_line(engine: str, state: Mapping[str, Any]) -> str:
    """Where an engine has an adapter, and what it has been through there."""
    pinned = ", pinned" if state["pinned"] else ""
    requests = state["requests"]
    return (
        f"on {engine}: {state['tier']}{pinned}; requests that found it on the device: {requests['device']}, "
        f"in host memory: {requests['host']}, in neither: {requests['none']}; loads: "
        f"{state['loads']}, the last in {state['load_seconds']:.3f} s; evictions: {state['evictions']}"
    )


def _fail(message: str, exit_code: Exit) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(exit_code)
