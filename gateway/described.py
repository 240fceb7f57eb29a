"""What a route takes and answers, said beside it for the OpenAPI description and read when one is asked for.

Nothing here acts on a request. What all routes have in common (the shape of errors, what a missing key or a
bad body ends in) is said once, in `gateway.openapi`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

JSON = "application/json"
EVENTS = "text/event-stream"

_ATTRIBUTE = "__described__"
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Description:
    """See `described`."""

    answer: Any = None
    media: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    errors: tuple[int, ...] = ()
    also: Mapping[int, Any] = field(default_factory=lambda: _NOTHING)
    body: Any = None
    body_media: str = JSON
    headers: tuple[str, ...] = ()


def described(
    answer: Any = None,
    *,
    media: Mapping[str, Any] = _NOTHING,
    errors: tuple[int, ...] = (),
    also: Mapping[int, Any] = _NOTHING,
    body: Any = None,
    body_media: str = JSON,
    headers: tuple[str, ...] = (),
) -> Callable[[Endpoint], Endpoint]:
    """Returns a decorator that notes what the endpoint answers; put it below the router's.

    `answer` is the type of the JSON that a success has, a TypedDict as a rule. `media` has further media
    types that a success may come in: for an event stream the type of one event's data, for others None.
    `errors` are the statuses that this route has beside those that follow from its key, parameters and body.
    `also` maps another status to the type of its JSON, where that is no error object. `body` is the type of a
    body that the endpoint reads by itself; `headers` names request headers that it reads by itself.
    """
    description = Description(answer, media, errors, also, body, body_media, headers)

    def note(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _ATTRIBUTE, description)
        return endpoint

    return note


def description_of(endpoint: Callable[..., Any]) -> Description:
    """Returns what was said of an endpoint; an empty description when nothing was."""
    return getattr(endpoint, _ATTRIBUTE, Description())
