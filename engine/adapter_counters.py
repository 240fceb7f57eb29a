"""What has happened to adapters in this engine since it started: for `/metrics` and for `adapters show`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace

MAX_HISTORIES = 4096
"""Adapters whose own figures are kept, also while they are in no memory; those used last."""


@dataclass(slots=True)
class AdapterHistory:
    """One adapter's figures: requests by where it was when they arrived, loads into host memory with the
    seconds of the last, and times that it had to leave the device."""

    requests_device: int = 0
    requests_host: int = 0
    requests_cold: int = 0
    loads: int = 0
    load_seconds: float = 0.0
    evictions: int = 0

    @property
    def hits(self) -> int:
        """Requests that found it on the device or in host memory."""
        return self.requests_device + self.requests_host


@dataclass(slots=True)
class AdapterCounters:
    """Sums over all adapters. ``requests_*``: where a request's adapter was when the request arrived.

    Loads go to host memory, from the local disk or from the store; copies from there to the device.
    """

    requests_device: int = 0
    requests_host: int = 0
    requests_cold: int = 0
    loads_disk: int = 0
    loads_store: int = 0
    loads_failed: int = 0
    loads_cancelled: int = 0
    load_seconds_disk: float = 0.0
    load_seconds_store: float = 0.0
    copies: int = 0
    copy_seconds: float = 0.0
    evictions_device: int = 0
    evictions_host: int = 0
    yields: int = 0
    """Times that an adapter's running sequences stood back so that another's could run."""
    histories: OrderedDict[bytes, AdapterHistory] = field(default_factory=OrderedDict)

    def history(self, digest: bytes) -> AdapterHistory:
        """An adapter's own figures, to be written to."""
        history = self.histories.get(digest)
        if history is None:
            history = self.histories[digest] = AdapterHistory()
            if len(self.histories) > MAX_HISTORIES:
                self.histories.popitem(last=False)
        else:
            self.histories.move_to_end(digest)
        return history

    def note_request(self, digest: bytes, *, on_device: bool, in_host: bool) -> None:
        """A request for an adapter has come."""
        history = self.history(digest)
        if on_device:
            self.requests_device += 1
            history.requests_device += 1
        elif in_host:
            self.requests_host += 1
            history.requests_host += 1
        else:
            self.requests_cold += 1
            history.requests_cold += 1

    def note_loaded(self, digest: bytes, *, was_local: bool, seconds: float) -> None:
        """An adapter has been read."""
        if was_local:
            self.loads_disk += 1
            self.load_seconds_disk += seconds
        else:
            self.loads_store += 1
            self.load_seconds_store += seconds
        history = self.history(digest)
        history.loads += 1
        history.load_seconds = seconds

    def note_evicted(self, digest: bytes) -> None:
        """An adapter had to leave the device for another."""
        self.evictions_device += 1
        self.history(digest).evictions += 1

    def sums(self) -> dict[str, float]:
        """The sums by name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "histories"}

    def snapshot(self) -> AdapterCounters:
        """The sums as they are now, without the adapters' own figures, for another thread."""
        return replace(self, histories=OrderedDict())
