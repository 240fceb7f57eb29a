"""Prometheus' text format, written fast.

A scrape has thousands of samples and runs on the event loop, where every stream waits for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Buckets:
    """A histogram of its own: how often a value was seen, by the least bound that is not below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value. Less than a microsecond, since it is done for each token."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Buckets) -> None:
        """Takes in what another one of the same bounds has seen."""
        self.counts = [own + more for own, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class Exposition:
    """The text as it grows. Samples belong to the family that was begun last."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._name = ""

    def family(self, name: str, kind: str, documentation: str) -> None:
        """Begins a family: `kind` is counter, gauge or histogram; a counter's samples get `_total`."""
        self._name = name + "_total" if kind == "counter" else name
        self._lines.append(f"# HELP {self._name} {documentation}\n# TYPE {self._name} {kind}\n")

    def sample(self, labels: str, value: float) -> None:
        """Adds a sample. `labels` is of `label_text`, or empty."""
        braced = f"{{{labels}}}" if labels else ""
        self._lines.append(f"{self._name}{braced} {float(value)}\n")

    def histogram(self, labels: str, buckets: Buckets) -> None:
        """Adds a histogram's samples."""
        name, before = self._name, labels + "," if labels else ""
        counts = list(accumulate(buckets.counts))
        for bound, count in zip(buckets.bounds, counts, strict=False):
            self._lines.append(f'{name}_bucket{{{before}le="{float(bound)}"}} {count}.0\n')
        braced = f"{{{labels}}}" if labels else ""
        self._lines.append(
            f'{name}_bucket{{{before}le="+Inf"}} {counts[-1]}.0\n'
            f"{name}_count{braced} {counts[-1]}.0\n{name}_sum{braced} {buckets.total}\n"
        )

    def encode(self) -> bytes:
        """Returns all of it."""
        return "".join(self._lines).encode()


def label_text(**labels: str) -> str:
    """Returns labels as they stand between the braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
