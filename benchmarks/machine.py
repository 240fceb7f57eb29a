"""What a figure was measured on, and how busy the machine was meanwhile: busy neighbours ruin timings."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = (3, 4)
"""Of the first line of /proc/stat: idle, and waiting for a disk."""


def facts() -> dict[str, Any]:
    """The processor, cores, memory and system of this machine."""
    models = [
        line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Neighbours:
    """Cores that processes other than the measured ones kept busy, and the load average at the start."""

    busy_cores: float
    load_average: float


class NeighbourMeter:
    """Measures what others do on this machine while a benchmark runs.

    Args:
        own_processes: returns the ids of the processes that the benchmark consists of; asked at both ends.
    """

    def __init__(self, own_processes: Callable[[], Iterable[int]]) -> None:
        self._own_processes = own_processes
        self._load_average = os.getloadavg()[0]
        self._started = time.monotonic()
        self._busy = _busy_ticks()
        self._own = {process: _ticks_of(process) for process in own_processes()}

    def read(self) -> Neighbours:
        """What has been going on since this meter was made."""
        elapsed = time.monotonic() - self._started
        own = sum(_ticks_of(process) - self._own.get(process, 0) for process in self._own_processes())
        others = (_busy_ticks() - self._busy - own) / _TICKS_PER_SECOND / elapsed
        return Neighbours(round(max(0.0, others), 2), round(self._load_average, 2))


def process_tree(root: int) -> list[int]:
    """The id of a process and those of all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat_fields(int(folder.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    tree = [root]
    for process in tree:
        tree += children.get(process, [])
    return tree


def processor_seconds(process: int) -> float:
    """Processor time that a process has used, all its threads together."""
    return _ticks_of(process) / _TICKS_PER_SECOND


def peak_memory(process: int) -> int:
    """The most resident memory that a process has had, in bytes."""
    return _status_bytes(process, "VmHWM:")


def memory(process: int) -> int:
    """The resident memory of a process, in bytes."""
    return _status_bytes(process, "VmRSS:")


def _status_bytes(process: int, field: str) -> int:
    for line in _lines(f"/proc/{process}/status"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _busy_ticks() -> int:
    values = [int(value) for value in _lines("/proc/stat")[0].split()[1:9]]
    return sum(value for index, value in enumerate(values) if index not in _IDLE_FIELDS)


def _ticks_of(process: int) -> int:
    fields = _stat_fields(process)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _stat_fields(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty when the process has ended."""
    lines = _lines(f"/proc/{process}/stat")
    return lines[0].rpartition(")")[2].split() if lines else []


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
