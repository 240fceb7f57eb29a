"""What the engine tells of adapters: where each is, and how full the tiers are."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine.adapter_counters import AdapterCounters, AdapterHistory


class Residency(enum.IntEnum):
    """The fastest tier that holds an adapter; the numbers are the wire's."""

    NONE = 0
    DISK = 1
    HOST = 2
    DEVICE = 3


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """Where an adapter is, who uses it, and what it has been through."""

    digest: bytes
    residency: Residency
    rank: int = 0
    num_pages: int = 0
    references: int = 0
    is_pinned: bool = False
    history: AdapterHistory = field(default_factory=AdapterHistory)


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """How full the tiers are, and what has happened in them since the start."""

    num_pages: int = 0
    num_free_pages: int = 0
    num_pinned_pages: int = 0
    host_bytes: int = 0
    counters: AdapterCounters = field(default_factory=AdapterCounters)

    def figures(self) -> dict[str, float]:
        """All of it by name: those of the fields here, and of `AdapterCounters`."""
        return {
            "num_pages": self.num_pages,
            "num_free_pages": self.num_free_pages,
            "num_pinned_pages": self.num_pinned_pages,
            "host_bytes": self.host_bytes,
            **self.counters.sums(),
        }
