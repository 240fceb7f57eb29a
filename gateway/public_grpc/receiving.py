"""Receives calls' messages, which may be anything: what does not parse is the caller's fault, and said so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext

from gateway.errors import ApiError, invalid_request
from gateway.public_grpc.failures import Failure, Metadata

Asked = TypeVar("Asked")
Parse = Callable[[bytes], Asked]
"""Raises DecodeError."""

_END: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]


async def one_message(context: ServicerContext, parse: Parse[Asked], most_bytes: int) -> Asked:
    """Returns a call's message. Raises ApiError 400 where none comes, or one that is too large or does not
    parse.
    """
    data: Any = await context.read()
    if data is _END:
        raise _invalid("The call has no message: send one.")
    return _parsed(data, parse, most_bytes)


async def each_message(
    context: ServicerContext, parse: Parse[Asked], most_bytes: int
) -> AsyncIterator[Asked]:
    """Yields a call's messages. Raises ApiError 400 for one that is too large or does not parse."""
    while (data := cast(Any, await context.read())) is not _END:
        yield _parsed(data, parse, most_bytes)


async def abort(context: ServicerContext, failure: Failure, metadata: Metadata = ()) -> NoReturn:
    """Ends a call with a failure."""
    await context.abort(failure.code, failure.message, (*metadata, *failure.metadata))
    raise AssertionError("abort raises")


def _invalid(message: str) -> ApiError:
    return invalid_request(message, code="invalid_message")


def _parsed(data: bytes, parse: Parse[Asked], most_bytes: int) -> Asked:
    if len(data) > most_bytes:
        raise _invalid(f"The message has {len(data)} bytes: this method takes {most_bytes}.")
    try:
        return parse(data)
    except DecodeError as error:
        raise _invalid(f"The message cannot be parsed ({error}): send what the .proto says.") from error
