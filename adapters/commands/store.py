"""What goes past the uploads: `adapters pull` from a hub, and `adapters reindex` for the operator."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from adapters.client import ClientError, Exit
from adapters.commands.shared import (
    DEFAULT_URL,
    AllowZero,
    ApiKey,
    AsJson,
    NewName,
    Promote,
    Url,
    connect,
    print_json,
)
from adapters.identity import check_name

if TYPE_CHECKING:
    from adapters.reindex import Reindexed

_HUB = "hf:"


def pull(
    source: Annotated[
        str, typer.Argument(metavar="hf:ORG/NAME[@REVISION]", help="Where the adapter is on the hub.")
    ],
    name: NewName,
    allow_zero: AllowZero = False,
    promote: Promote = True,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Let the server take an adapter from the Hugging Face hub, where its operator allows that.

    Example: adapters pull hf:acme/llama-sql-lora --name sql
    """
    check_name(name)
    repo, separator, revision = source.removeprefix(_HUB).partition("@")
    if not source.startswith(_HUB) or repo.count("/") != 1 or (separator and not revision):
        raise ClientError(
            f"{source!a} is no place on the hub; write hf:org/name or hf:org/name@revision.", Exit.USAGE
        )
    body = {"repo": repo, "name": name, "allow_zero": allow_zero, "promote": promote}
    with connect(url, api_key) as client:
        adapter = client.pull(body | ({"revision": revision} if revision else {}))
    if as_json:
        print_json(adapter)
    else:
        typer.echo(f"{adapter['id']}: rank {adapter['rank']}, {decimal(adapter['bytes'])}")


def reindex(
    redis_url: Annotated[
        str, typer.Option("--redis-url", envvar="LORAPLEX_REDIS_URL", help="Redis or Valkey to fill.")
    ] = "redis://127.0.0.1:6380/0",
    store: Annotated[
        str,
        typer.Option("--store", envvar="LORAPLEX_STORE", help="The store: a folder, or s3://bucket/prefix."),
    ] = "var/store",
    as_json: AsJson = False,
) -> None:
    """Rebuild the names of all tenants' adapters from the store, after Redis has been lost.

    For the operator, on a machine that reaches both. What Redis has already stays as it is. Tenants and keys
    are not in the store: make them anew, tenants with the ids they had. A store that no gateway has used, or
    that is another Redis', is refused.
    """
    result = asyncio.run(_reindex(redis_url, store))
    if as_json:
        print_json(asdict(result))
    else:
        for fault in result.faults:
            typer.echo(f"warning: {fault}", err=True)
        typer.echo(f"{result.restored} names restored, {result.current} were there already")
    if result.faults:
        raise typer.Exit(Exit.REFUSED)


async def _reindex(redis_url: str, location: str) -> Reindexed:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    from adapters.blob_store import StoreUnavailable, check_location, is_remote, open_existing
    from adapters.registry import Registry
    from adapters.reindex import reindex
    from adapters.store_identity import WrongStore, confirm_identity

    try:
        check_location(location)
        client = Redis.from_url(redis_url)
    except ValueError as error:
        raise ClientError(f"This cannot be used: {error}.", Exit.USAGE) from None
    without_store = Exit.UNREACHABLE if is_remote(location) else Exit.REFUSED
    with tempfile.TemporaryDirectory(prefix="loraplex-reindex-") as scratch:
        async with client as redis:
            try:
                await redis.ping()
                opened = open_existing(location, Path(scratch))
                await confirm_identity(redis, opened, location)
                return await reindex(Registry(redis), opened)
            except RedisError as error:
                raise ClientError(f"Cannot reach Redis at {redis_url}: {error}.", Exit.UNREACHABLE) from None
            except WrongStore as fault:
                raise ClientError(str(fault), Exit.REFUSED) from None
            except StoreUnavailable as fault:
                raise ClientError(str(fault), without_store) from None
            except OSError as error:
                raise ClientError(f"The store cannot be read: {error}.", without_store) from None
