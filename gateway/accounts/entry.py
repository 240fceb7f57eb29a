"""What the ledger says of one request, and how a request may have ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

import orjson


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    DISCONNECTED = "disconnected"  # its client went; what was made until then counts
    REFUSED = "refused"  # no engine took it
    FAILED = "failed"
    DEADLINE = "deadline"
    LOST = "lost"  # its gateway died; what that had last recorded counts


ERRORS = frozenset(Outcome) - {Outcome.COMPLETED, Outcome.DISCONNECTED}
"""What the aggregates count as `errors`."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a request ended and what it cost, or would cost if it ended now.

    No token of its prompt counts before an engine has begun with it. `ttft_ms` is None when no token came.
    """

    outcome: Outcome
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_ms: int
    queue_ms: int = 0
    ttft_ms: int | None = None
    engine: str = ""


@dataclass(slots=True)
class LedgerEntry:
    """One request in the ledger. What is below `route` changes until the request has ended.

    `adapter` is as its tenant calls it, `sql` or `owner/sql`, and empty for the base model, as are `version`
    and `digest` (hex). Times are in ms; `time`, the arrival, counts from 1970.
    """

    id: str
    time: int
    tenant: str
    key: str
    model: str
    adapter: str = ""
    version: str = ""
    digest: str = ""
    route: str = ""
    engine: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_ms: int = 0
    ttft_ms: int | None = None
    duration_ms: int = 0
    outcome: Outcome = Outcome.LOST

    def settle(self, settlement: Settlement) -> None:
        """Takes over how the request ended."""
        self.outcome, self.engine = settlement.outcome, settlement.engine
        self.input_tokens, self.cached_tokens = settlement.input_tokens, settlement.cached_tokens
        self.output_tokens, self.duration_ms = settlement.output_tokens, settlement.duration_ms
        self.queue_ms, self.ttft_ms = settlement.queue_ms, settlement.ttft_ms

    def to_wire(self) -> str:
        """Returns the entry as the scripts take it: a JSON array of texts, in the order of FIELDS."""
        ttft = "" if self.ttft_ms is None else str(self.ttft_ms)
        return orjson.dumps(
            [
                *(self.id, str(self.time), self.tenant, self.key, self.model, self.adapter, self.version),
                *(self.digest, self.route, self.engine, str(self.input_tokens), str(self.cached_tokens)),
                *(str(self.output_tokens), str(self.queue_ms), ttft, str(self.duration_ms), self.outcome),
            ]
        ).decode()

    @classmethod
    def from_fields(cls, found: Mapping[str | bytes, str | bytes]) -> LedgerEntry:
        """Returns the entry of a message of the ledger's stream, as the client of Redis gives it."""
        text = {as_text(name): as_text(value) for name, value in found.items()}
        numbers = {name: int(text[name]) for name in _NUMBERS}
        ttft = int(text["ttft_ms"]) if text["ttft_ms"] else None
        return cls(**{**text, **numbers, "ttft_ms": ttft, "outcome": Outcome(text["outcome"])})


FIELDS = tuple(field.name for field in fields(LedgerEntry))
"""The fields of a message of the ledger's stream, in order."""

_NUMBERS = ("time", "input_tokens", "cached_tokens", "output_tokens", "queue_ms", "duration_ms")


def as_text(value: str | bytes) -> str:
    """Returns a reply of Redis as text; it is text or bytes, as the client was made."""
    return value.decode() if isinstance(value, bytes) else value
