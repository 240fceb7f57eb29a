"""Lists in pages, as OpenAI has them: after an id, so many."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from redis.asyncio import Redis

from gateway.accounts.entry import as_text


class Listed(Protocol):
    """What stands in a list."""

    @property
    def id(self) -> str: ...

    def to_dict(self) -> Mapping[str, Any]: ...


T = TypeVar("T", bound=Listed)
_AT_ONCE = 32
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_id(text: str) -> bool:
    """Whether a client's text can be an id. Others could be a part of the name of another key of Redis."""
    return _ID.fullmatch(text) is not None


class UnknownCursor(Exception):
    """What a page was to begin after is not in the list."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items of a list, and whether there are more."""

    items: list[T]
    has_more: bool

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's list object."""
        return {
            "object": "list",
            "data": [item.to_dict() for item in self.items],
            "first_id": self.items[0].id if self.items else None,
            "last_id": self.items[-1].id if self.items else None,
            "has_more": self.has_more,
        }


async def ids_of(
    redis: Redis, key: str, start: int = 0, stop: int = -1, *, newest_first: bool = False
) -> list[str]:
    """Members of a sorted set by their places, both included; all unless told otherwise."""
    found: list[Any] = await redis.zrange(key, start, stop, desc=newest_first)
    return [as_text(each) for each in found]


async def page_of(
    redis: Redis,
    key: str,
    find: Callable[[str], Awaitable[T | None]],
    *,
    after: str | None,
    limit: int,
    newest_first: bool,
) -> Page[T]:
    """A page of a sorted set of ids, oldest first or newest first. Ids that `find` finds nothing for are
    passed over. Raises UnknownCursor.
    """
    start = 0
    if after is not None:
        rank = await (redis.zrevrank(key, after) if newest_first else redis.zrank(key, after))
        if rank is None:
            raise UnknownCursor
        start = int(rank) + 1  # type: ignore[arg-type]
    items: list[T] = []
    while len(items) <= limit:
        wanted = max(limit + 1 - len(items), _AT_ONCE)  # most may be passed over
        ids = await ids_of(redis, key, start, start + wanted - 1, newest_first=newest_first)
        for at in range(0, len(ids), _AT_ONCE):
            some = ids[at : at + _AT_ONCE]
            items += [found for found in await asyncio.gather(*map(find, some)) if found is not None]
        start += len(ids)
        if len(ids) < wanted:
            break
    return Page(items[:limit], has_more=len(items) > limit)
