"""What a name means: `adapters promote`, `rollback`, `canary`, `pin`, `unpin`, `rename` and `history`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from adapters.client import ClientError, Exit
from adapters.commands.quantities import quantity
from adapters.commands.shared import (
    DEFAULT_URL,
    ApiKey,
    AsJson,
    Name,
    Url,
    connect,
    meaning,
    moment,
    print_json,
    print_table,
)
from adapters.identity import check_name


def promote(
    name: Name,
    version: Annotated[
        int | None,
        typer.Argument(
            min=1, help="Number of the version. Without it: the canary, or the newest where none runs."
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Make a version live: the bare name means it from the next request on. Ends a canary.

    Example: adapters promote sql 4
    """
    body = {} if version is None else {"version": version}
    _change(name, "POST", "promote", body, url=url, api_key=api_key, as_json=as_json)


def rollback(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Make the version live that was so before this one; again, the one before that."""
    _change(name, "POST", "rollback", None, url=url, api_key=api_key, as_json=as_json)


def canary(
    name: Name,
    version: Annotated[int | None, typer.Argument(min=1, help="Number of the version to try.")] = None,
    percent: Annotated[
        float | None,
        typer.Option("--percent", callback=quantity, help="Its share of the requests for the bare name."),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="End the canary; promote ends it as well.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Give a version a share of the requests for the bare name. Each `user` of requests stays with a version.

    Example: adapters canary sql 4 --percent 10
    """
    if off and (version is not None or percent is not None):
        raise ClientError("--off takes neither a version nor --percent.", Exit.USAGE)
    if off:
        _change(name, "DELETE", "canary", None, url=url, api_key=api_key, as_json=as_json)
        return
    if version is None or percent is None:
        raise ClientError("Give a version and --percent, or --off.", Exit.USAGE)
    body = {"version": version, "percent": percent}
    _change(name, "PUT", "canary", body, url=url, api_key=api_key, as_json=as_json)


def pin(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Have engines keep the live version in memory, whichever it is, so that its first token never waits."""
    _change(name, "PUT", "pin", None, url=url, api_key=api_key, as_json=as_json)


def unpin(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Let engines evict an adapter again."""
    _change(name, "DELETE", "pin", None, url=url, api_key=api_key, as_json=as_json)


def rename(
    name: Name,
    new_name: Annotated[str, typer.Argument(help="What to call it from now on.", show_default=False)],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Give an adapter, with all its versions and grants, another name. The old name is gone at once."""
    check_name(new_name)
    _change(name, "POST", "rename", {"name": new_name}, url=url, api_key=api_key, as_json=as_json)


def history(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List what happened to an adapter, the latest first, and by which key."""
    check_name(name)
    with connect(url, api_key) as client:
        answer = client.of(name, "GET", "history")
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            moment(event["at"]),
            event["action"].replace("_", " "),
            f"{name}@{event['version']}" if event["version"] else "",
            event["detail"],
            event["by"],
        )
        for event in answer["data"]
    ]
    print_table(("when", "what", "version", "", "key"), rows)


def _change(
    name: str,
    method: str,
    route: str,
    body: dict[str, Any] | None,
    *,
    url: str,
    api_key: str,
    as_json: bool,
) -> None:
    check_name(name)
    with connect(url, api_key) as client:
        adapter = client.of(name, method, route, body=body)
    print_json(adapter) if as_json else typer.echo(meaning(adapter))
