"""Names of things in the paths of URLs."""

from __future__ import annotations

from urllib.parse import quote


class NoSegment(ValueError):
    """Text that no segment of a path can hold; the message is a sentence for the user."""


def url_segment(name: str) -> str:
    """A name or id as one segment of a URL's path, whatever a user typed.

    Raises `NoSegment` for what would make it another path, and so the name of something else: clients take
    `.` and `..` for steps, and servers see no difference between a slash and a quoted one.
    """
    if name in ("", ".", "..") or "/" in name:
        raise NoSegment(f"{name[:80]!a} is no name or id; write one as it is listed.")
    return quote(name, safe="", errors="surrogateescape")
