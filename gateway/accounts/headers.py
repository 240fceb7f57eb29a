"""What a client is told of its limits: the `x-ratelimit-*` headers, and what a refusal says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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


class Rule(NamedTuple):
    """A limit that holds for a caller, whatever it asks for. `subject` is whose, as windows.py has it."""

    subject: str
    kind: str
    most: int

    @property
    def owner(self) -> str:
        """Whose limit it is, in words."""
        if self.subject == TENANT:
            return "the tenant"
        noun, _, name = self.subject.partition(":")
        return f"the {noun} '{name}'"


@dataclass(frozen=True, slots=True)
class Standings:
    """How a request stands with each of the rules that it meets, a column for each figure."""

    rules: Sequence[Rule] = ()
    amounts: Sequence[int] = ()
    """What it asks for."""
    used: Sequence[int] = ()
    """What is used, with this request where it was admitted."""
    reset_ms: Sequence[int] = ()
    """In how many ms all of it can be had again; 0: it can now."""

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's headers for the limits per minute that there are. Where a kind is limited for
        several subjects, and in `-tokens` for input and output, the one with the least left is told.
        """
        rules = self.rules
        left = [max(rule.most - used, 0) for rule, used in zip(rules, self.used, strict=True)]
        scarcity = [(most, -reset_ms) for most, reset_ms in zip(left, self.reset_ms, strict=True)]
        headers: list[tuple[bytes, bytes]] = []
        for places, limit, remaining, reset in _told_of(tuple(rules)):
            at = min(places, key=scarcity.__getitem__)
            headers += (
                (limit, b"%d" % rules[at].most),
                (remaining, b"%d" % left[at]),
                (reset, duration(self.reset_ms[at]).encode()),
            )
        return headers

    def headers(self) -> dict[str, str]:
        """Returns the same as text."""
        return {name.decode(): value.decode() for name, value in self.raw_headers()}

    def refusing(self) -> list[int]:
        """Returns the places of the rules of which less is left than the request asks for."""
        columns = zip(self.rules, self.amounts, self.used, strict=True)
        return [at for at, (rule, amount, used) in enumerate(columns) if used + amount > rule.most]


NO_STANDINGS = Standings()
"""Those of a request that meets no rule, or of which Redis has said nothing."""


@lru_cache(maxsize=4096)
def _told_of(rules: Sequence[Rule]) -> Sequence[tuple[Sequence[int], bytes, bytes, bytes]]:
    """Returns the headers that there are: which rules they may tell of, and the names of three."""
    found: list[tuple[Sequence[int], bytes, bytes, bytes]] = []
    for name in _HEADER_NAMES:
        places = [at for at, rule in enumerate(rules) if name in _HEADERS_OF.get(rule.kind, ())]
        if places:
            limit, remaining, reset = (
                f"x-ratelimit-{what}-{name}".encode() for what in ("limit", "remaining", "reset")
            )
            found.append((places, limit, remaining, reset))
    return found


def duration(ms: int) -> str:
    """Returns a time as OpenAI writes it: `12ms`, `1.2s`, `6m0s`."""
    if ms < 1000:
        return f"{ms}ms" if ms else "0s"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{seconds}" if minutes else seconds


def refusal(standings: Standings) -> ApiError:
    """Returns the 429 for a request that some of these limits refuse: it tells of the one that lasts longest,
    since coming again before that is in vain.
    """

    def wait_ms_of(at: int) -> int:
        if standings.rules[at].kind == CONCURRENT:
            return _CONCURRENT_RETRY_MS
        return max(standings.reset_ms[at], 1)

    worst = max(standings.refusing(), key=wait_ms_of)
    rule, used, wait_ms = standings.rules[worst], standings.used[worst], wait_ms_of(worst)
    again = _AGAIN.get(rule.kind) or f"in {duration(wait_ms)}"
    return ApiError(
        429,
        f"Rate limit reached for {rule.owner}: {_NOUNS[rule.kind]}. Limit {rule.most:,}, used {used:,}, left "
        f"{max(rule.most - used, 0):,}, requested {standings.amounts[worst]:,}. Please try again {again}.",
        type=_OPENAI_TYPES.get(rule.kind, "tokens"),
        code="rate_limit_exceeded",
        param=rule.kind,
        headers={"Retry-After": str(math.ceil(wait_ms / 1000)), **standings.headers()},
    )


def never_fits(rule: Rule, amount: int) -> ApiError:
    """Returns the 400 for a request that asks for more than a limit has when nothing of it is used."""
    mend = "Shorten the prompt" if rule.kind == INPUT_TOKENS else "Lower 'max_tokens'"
    return invalid_request(
        f"This request needs up to {amount:,} {_NOUNS[rule.kind].partition(' per')[0]}, but {rule.owner} has "
        f"at most {rule.most:,} {_NOUNS[rule.kind]}. {mend}, or ask your operator.",
        param=rule.kind,
        code="request_exceeds_limit",
    )
