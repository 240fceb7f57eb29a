"""How much memory this process may still take: the machine's, or what its container leaves of it.

``MemAvailable`` is the whole machine's. A container is bound by its control group and those above it, and
one that takes more is killed without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Files:
    """What a version of control groups calls its files, and the field of caches that can be given up."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def available_ram(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken without swapping or being killed.

    Args:
        proc, cgroups: where the kernel tells of them.
    """
    kibibytes = _number(r"^MemAvailable:\s+(\d+) kB$", proc / "meminfo")
    assert kibibytes is not None, "Linux states MemAvailable"
    return min([kibibytes * 1024, *_rooms(proc, cgroups)])


def _rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group that holds this process leaves, of those that have a limit."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", _V1
        else:
            continue
        # In a container the path may be the host's; then only the root, which is the container's, is there.
        group = PurePosixPath(path)
        for level in (group, *group.parents):
            room = _room(root / level.relative_to("/"), files)
            if room is not None:
                yield room


def _room(folder: Path, files: _Files) -> int | None:
    limit, usage = _number(r"^(\d+)$", folder / files.limit), _number(r"^(\d+)$", folder / files.usage)
    if limit is None or usage is None:
        return None
    reclaimable = _number(rf"^{files.reclaimable} (\d+)$", folder / "memory.stat") or 0
    return max(0, limit - usage + reclaimable)


def _number(pattern: str, path: Path) -> int | None:
    match = re.search(pattern, _text(path), re.MULTILINE)
    return int(match.group(1)) if match else None


def _text(path: Path) -> str:
    """A file's text; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
