"""What a client is told of its limits: the `x-ratelimit-*` headers, and what a refusal says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gateway.accounts.windows import (
    CONCURRENT,
    INPUT_TOKENS,
    MONTH_TOKENS,
    OUTPUT_TOKENS,
    REQUESTS,
    TENANT,
)
from gateway.errors import ApiError, invalid_request

_NOUNS = {
    REQUESTS: "requests per minute",
    INPUT_TOKENS: "input tokens per minute",
    OUTPUT_TOKENS: "output tokens per minute",
    CONCURRENT: "concurrent requests",
    MONTH_TOKENS: "tokens per month",
}
_HEADERS_OF = {
    REQUESTS: ("requests",),
    INPUT_TOKENS: ("tokens", "input-tokens"),
    OUTPUT_TOKENS: ("tokens", "output-tokens"),
}
_HEADER_NAMES = ("requests", "tokens", "input-tokens", "output-tokens")
_OPENAI_TYPES = {REQUESTS: "requests", CONCURRENT: "requests"}
_AGAIN = {CONCURRENT: "when one of them has ended", MONTH_TOKENS: "next month (UTC)"}
_CONCURRENT_RETRY_MS = 1000
"""Nobody knows when a request ends."""


class Limit(NamedTuple):
    """One limit that a request meets. `subject` is whose, as windows.py has it; `amount` what it asks for."""

    subject: str
    kind: str
    most: int
    amount: int

    @property
    def owner(self) -> str:
        """Whose limit it is, in words."""
        if self.subject == TENANT:
            return "the tenant"
        noun, _, name = self.subject.partition(":")
        return f"the {noun} '{name}'"


class Standing(NamedTuple):
    """What is used of a limit, and in how many ms all of it can be had again (0: it can now)."""

    limit: Limit
    used: int
    reset_ms: int

    @property
    def left(self) -> int:
        """What can still be had."""
        return max(self.limit.most - self.used, 0)

    @property
    def refuses(self) -> bool:
        """Whether the request asked for more than what is left."""
        return self.used + self.limit.amount > self.limit.most


def rate_headers(standings: Sequence[Standing]) -> dict[str, str]:
    """Returns OpenAI's headers for the limits per minute that there are. Where a kind is limited for several
    subjects, and in `-tokens` for input and output, the one with the least left is told.
    """
    scarcest: dict[str, Standing] = {}
    for each in standings:
        for name in _HEADERS_OF.get(each.limit.kind, ()):
            other = scarcest.get(name)
            if other is None or (each.left, -each.reset_ms) < (other.left, -other.reset_ms):
                scarcest[name] = each
    headers: dict[str, str] = {}
    for name in _HEADER_NAMES:
        if (each := scarcest.get(name)) is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(each.limit.most)
            headers[f"x-ratelimit-remaining-{name}"] = str(each.left)
            headers[f"x-ratelimit-reset-{name}"] = duration(each.reset_ms)
    return headers


def duration(ms: int) -> str:
    """Returns a time as OpenAI writes it: `12ms`, `1.2s`, `6m0s`."""
    if ms < 1000:
        return f"{ms}ms" if ms else "0s"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{seconds}" if minutes else seconds


def refusal(standings: Sequence[Standing]) -> ApiError:
    """Returns the 429 for a request that some of these limits refuse: it tells of the one that lasts longest,
    since coming again before that is in vain.
    """
    worst = max((each for each in standings if each.refuses), key=_wait_ms)
    limit, wait_ms = worst.limit, _wait_ms(worst)
    again = _AGAIN.get(limit.kind) or f"in {duration(wait_ms)}"
    return ApiError(
        429,
        f"Rate limit reached for {limit.owner}: {_NOUNS[limit.kind]}. Limit {limit.most:,}, used "
        f"{worst.used:,}, left {worst.left:,}, requested {limit.amount:,}. Please try again {again}.",
        type=_OPENAI_TYPES.get(limit.kind, "tokens"),
        code="rate_limit_exceeded",
        param=limit.kind,
        headers={"Retry-After": str(math.ceil(wait_ms / 1000)), **rate_headers(standings)},
    )


def never_fits(limit: Limit) -> ApiError:
    """Returns the 400 for a request that asks for more than a limit has when nothing of it is used."""
    mend = "Shorten the prompt" if limit.kind == INPUT_TOKENS else "Lower 'max_tokens'"
    return invalid_request(
        f"This request needs up to {limit.amount:,} {_NOUNS[limit.kind].partition(' per')[0]}, but "
        f"{limit.owner} has at most {limit.most:,} {_NOUNS[limit.kind]}. {mend}, or ask your operator.",
        param=limit.kind,
        code="request_exceeds_limit",
    )


def _wait_ms(standing: Standing) -> int:
    return _CONCURRENT_RETRY_MS if standing.limit.kind == CONCURRENT else max(standing.reset_ms, 1)
