"""What a batch is, and the states that it goes through::

validating ──▶ in_progress ──▶ finalizing ──▶ completed | expired
    │              │
    │              └──────────▶ cancelling ──▶ cancelled      (from validating, too)
    └──▶ failed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from gateway.accounts.entry import as_text


class Status(StrEnum):
    """Where a batch is in its life; the words are OpenAI's."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED})

TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)
"""When it entered a state, where it has."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. Times are Unix times in seconds, 0 where it has not come to that."""

    tenant: str
    id: str
    key: str
    """Id of the API key that made it, with whose rights and limits it runs."""
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = Status.VALIDATING
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_kept_s: int = 0
    output_file_id: str = ""
    error_file_id: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will change."""
        return self.status in ENDED

    def to_fields(self) -> list[str | int]:
        """Its hash in Redis, flat, but for what only comes later."""
        named: dict[str, str | int] = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in _STRUCTURED
        }
        named |= {"errors": json.dumps(self.errors), "metadata": json.dumps(self.metadata), "holder": ""}
        return [part for pair in named.items() for part in pair]

    @classmethod
    def from_fields(cls, found: Mapping[bytes | str, bytes | str]) -> Batch:
        """A batch from its hash in Redis."""
        text = {as_text(name): as_text(value) for name, value in found.items()}
        values: dict[str, Any] = {
            each.name: int(text[each.name]) if each.name in _NUMBERS else text[each.name]
            for each in fields(cls)
            if each.name not in _STRUCTURED
        }
        return cls(
            **{**values, "status": Status(text["status"])},
            errors=json.loads(text["errors"]),
            metadata=json.loads(text["metadata"]),
            times={name: int(text[name]) for name in TIMES if name in text},
        )

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id or None,
            "error_file_id": self.error_file_id or None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.times.get(name) for name in TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata or None,
        }


_STRUCTURED = frozenset({"errors", "metadata", "times"})
_NUMBERS = frozenset({"created_at", "expires_at", "total", "completed", "failed", "output_kept_s"})
